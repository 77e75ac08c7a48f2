// One op from its begin to its end: what it reads, writes, draws and makes.
#pragma once

#include <functional>
#include <vector>

#include "evict/stress.h"
#include "observe/saved_tensors.h"
#include "rebuild/plan_actions.h"

namespace delta {

// Without the session's lock.
class OpObserver : public Part {
 public:
  OpObserver(SessionState& state, Sources& sources, OutsideMemory& outside, TensorPages& tensors,
             PlanTable& plans, SwapTiers& tiers, Eviction& eviction, SwapIn& swap_in,
             StressEviction& stress, PlanActions& plan_actions, SavedTensors& saved, StepLog& log);

  void begin(ThreadState& ts, OpInfo* info, c10::ArrayRef<const c10::IValue> inputs);
  void end(ThreadState& ts, c10::ArrayRef<const c10::IValue> outputs);
  // An op that the recorder does not follow is about to write.
  void note_foreign_writes(const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs);

  void begin_step();
  void set_taping(bool on) { taping_ = on; }  // false while an optimizer steps
  // Called at op boundaries only: when many events have piled up; when backward is over and
  // something else begins.
  void set_drain(std::function<void(int64_t)> drain) { drain_ = std::move(drain); }
  void set_step_over(std::function<void(int64_t)> step_over) { step_over_ = std::move(step_over); }

 private:
  // What is known of the ops of one signature: an operator on arguments of one geometry.
  struct Facts {
    int64_t watermark_bytes = -1;  // the highest seen; -1: none yet
    double seconds = -1;           // the least seen; -1: not timed yet
  };
  struct Signature {
    uint64_t hash = 0;
    uint64_t op = 0;            // hash of the op's name and of the phase alone
    uint64_t wanted_grads = 0;  // a bit for each tensor that needs one
    int64_t input_bytes = 0;
    bool floats = false;  // a tensor with dimensions has a floating dtype
  };

  void note_phase(bool in_backward);
  Signature signature_of(const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs,
                         bool in_backward, bool grads) const;
  Facts facts_for(OpenOp& open, const Signature& signature);
  int64_t expected_bytes(const Facts& facts, const Signature& signature) const;
  void at_boundary(int64_t need_bytes, Guard& guard);
  void open_window(OpenOp& open);
  void note_writes(const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs, ToClone& to_clone);
  int64_t watermark_of(const OpenOp& open);
  double note_facts(const OpenOp& open, int64_t watermark_bytes, double seconds, bool threw);
  void trace(const OpenOp& open, double seconds);
  void take_results(OpenOp& open, c10::ArrayRef<const c10::IValue> outputs, bool threw);
  void note_draws(OpenOp& open);
  c10::intrusive_ptr<Value> new_value(OpenOp& open, bool unknown, int64_t bytes, bool is_argument,
                                      int position, int index);
  void take_written(OpenOp& open, bool unknown);
  void take_returned(OpenOp& open, bool unknown, int position, int index, const at::Tensor& t);
  void resolve_pending(OpenOp& open);
  bool saves_clone(const OpenOp& open, const at::Tensor& saved) const;
  Page* take_saved_clone(OpenOp& open, const at::Tensor& saved);

  Sources& sources_;
  OutsideMemory& outside_;
  TensorPages& tensors_;
  PlanTable& plans_;
  SwapTiers& tiers_;
  Eviction& eviction_;
  SwapIn& swap_in_;
  StressEviction& stress_;
  PlanActions& plan_actions_;
  SavedTensors& saved_;
  StepLog& log_;
  std::vector<Facts> facts_;
  ska::flat_hash_map<uint64_t, size_t> facts_of_;  // index into facts_ by signature
  // Watermark over the bytes of the inputs, when a signature was new: by an op's place in the step
  // the most, by its name and phase alone the last.
  ska::flat_hash_map<uint64_t, double> growth_of_;
  bool taping_ = true;
  std::function<void(int64_t)> drain_;
  std::function<void(int64_t)> step_over_;
  const uint64_t stranger_draws_before_;  // when the session began
};

}  // namespace delta
