// A step that is known to fit the budget: nothing is recorded, nothing packed, and what shows that
// it is another step after all is looked at.
//
// Note: what wakes the runtime up
//  1. One of the first ops is another than in the steps that fitted (first_ops.h). It is observed.
//  2. More is live than any of those had at its peak. On an accelerator each op looks. On the CPU
//     the pool tells in an allocation, and the next op looks. The op at which this shows is not
//     observed, nor its parts. Not below an op of autograd's; nor in a backward; nor where
//     saved-tensor hooks are switched off (torch.func), or somebody traces: there it waits for the
//     next op.
//  3. From there on the step is an observed one. What was saved before stays where it is.
#pragma once

#include <algorithm>
#include <functional>

#include "observe/first_ops.h"
#include "state/account.h"

namespace delta {

struct Session;

class IdleStep {
 public:
  explicit IdleStep(const Account& account) : account_(account) {}

  void begin(Session& session, int64_t most_bytes);  // on this thread, which watches already
  void end();                                        // idempotent, on any thread
  void suspend(bool on) { suspended_ = std::max(0, suspended_ + (on ? 1 : -1)); }  // counts
  int64_t peak_bytes() const { return peak_bytes_; }  // at ops of an accelerator
  void set_wake(std::function<void(int64_t)> wake) { wake_ = std::move(wake); }

  // Takes in one of the first ops of a step. Whether it is to be observed: always, but for those of
  // an idle step that nothing wakes up.
  bool observes(const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs);
  bool wakes_here();  // at an op that begins; whether it did

  void look_at_memory();  // at each op, from now on

  FirstOps first_ops;

 private:
  void end_first_ops();
  void look_no_more();
  bool wake();

  const Account& account_;
  Session* session_ = nullptr;  // while it is idle
  int64_t most_bytes_ = 0;
  int64_t peak_bytes_ = 0;
  int suspended_ = 0;
  std::function<void(int64_t)> wake_;
};

void forget_idle_step();  // in a forked child

}  // namespace delta
