// Pack and unpack: what autograd saves becomes a ticket over a page, or is passed through.
//
// Note: what pack sees
//  1. Inputs are packed inside the op before the kernel ran, outputs after it but before the op's
//     end callback. A storage that the open op writes, or that nobody knows yet, stays pending and
//     is resolved at the op's end.
//  2. Identity is by storage. A Linear's weight arrives as a view, BatchNorm's statistics as plain
//     tensors.
//  3. Keeping the very tensor makes a cycle through its grad_fn; a shallow copy without history is
//     kept instead.
//  4. Without hooks autograd holds an input itself: one that is pointed to other memory before
//     backward (`x.data = y`) is used as it is then. So each ticket knows the tensor, too.
//  5. Hooks switch autograd's own check for in-place changes off, so each ticket makes it.
#pragma once

#include "observe/open_op.h"
#include "observe/step_log.h"
#include "observe/tensor_pages.h"
#include "rebuild/replay.h"

namespace delta {

class SavedTensors : public Part {
 public:
  SavedTensors(SessionState& state, TensorPages& tensors, DeviceEvidence& on_device,
               Evidence& evidence, PlanTable& plans, SwapTiers& tiers, Replay& replay, StepLog& log)
      : Part(state),
        tensors_(tensors),
        on_device_(on_device),
        evidence_(evidence),
        plans_(plans),
        tiers_(tiers),
        replay_(replay),
        log_(log) {}

  void pack(const at::Tensor& t, Ticket& ticket);
  // Gives a ticket its page, or leaves it with a copy of the tensor `t` that was saved. Under the
  // lock.
  void resolve(Ticket& ticket, Page* page, const at::Tensor& t);
  // Most unpacked tensors are there. Returns an undefined tensor for what has to be brought back or
  // waited for first, and where an error is to be told.
  at::Tensor unpack_resident(Ticket& ticket);
  at::Tensor unpack(Ticket& ticket);
  // The ticket goes. Returns whether nothing is saved any more by a session that was left.
  bool release(Ticket& ticket);

 private:
  void manage(Page& page, const at::Tensor& t);
  at::Tensor view_if_resident(Ticket& ticket);
  at::Tensor view_for(const Ticket& ticket, const c10::Storage& storage) const;
  void note_used(Page& page);
  void count_kept(const at::Tensor& t, Page* page, KeptReason reason);
  void let_go(Page& page);

  TensorPages& tensors_;
  DeviceEvidence& on_device_;
  Evidence& evidence_;
  PlanTable& plans_;
  SwapTiers& tiers_;
  Replay& replay_;
  StepLog& log_;
};

}  // namespace delta
