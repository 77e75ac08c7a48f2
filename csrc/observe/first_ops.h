// The first ops of a step, by which a step that is known to fit the budget is told from another.
//
// Note: which ops count
//  1. The first ops of steps that had room to spare are remembered, as hashes of the first, the
//     first two, and so on. Those of an idle step are compared with these.
//  2. Only ops count whose results get a gradient: what a step begins with beside them (zeroing
//     gradients, a rollout, moving a batch) says little of what will be saved. Nor do ops under a
//     dispatch mode, where somebody traces: there is no waking up in the middle of that.
#pragma once

#include <c10/util/flat_hash_map.h>

#include <atomic>
#include <utility>
#include <vector>

#include "observe/op_info.h"

namespace delta {

class FirstOps {
 public:
  enum class Found {
    Known,    // goes on as a step that fits
    Enough,   // and is one
    Unknown,  // this op is another
  };

  void begin_learning();  // a step that is observed begins
  void begin_comparing();
  void end() { mode_ = Mode::Off; }
  // What an idle step began with, for the rest of it to be learned behind.
  std::vector<uint64_t> take_beginnings() { return std::move(beginnings_); }
  void learn_behind(std::vector<uint64_t> beginnings);
  bool looking() const { return mode_ != Mode::Off; }
  bool comparing() const { return mode_ == Mode::Comparing; }
  Found next(const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs);

  void remember();  // the step that was learned last fits
  void forget();    // none does

 private:
  enum class Mode { Off, Learning, Comparing };

  std::atomic<Mode> mode_ = Mode::Off;
  std::vector<uint64_t> beginnings_;  // of this step: the first op, the first two, ...
  ska::flat_hash_set<uint64_t> known_;
};

}  // namespace delta
