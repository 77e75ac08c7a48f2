// A step that is known to fit the budget: nothing is recorded, nothing packed, and what shows that
// it is another step after all is looked at.
//
// Note: what wakes the runtime up
//  1. One of the first ops is another than in the steps that fitted (first_ops.h). It is observed.
//  2. More is live than any of those had at its peak. PyTorch calls back at a share of the ops,
//  which
//     costs the others next to nothing; the op at which this shows is not observed, nor its parts.
//     Not below an op of autograd's; nor in a backward, which saves nothing; nor where somebody
//     traces.
//  3. From there on the step is an observed one. What was saved before stays where it is.
#pragma once

#include <functional>

#include "observe/first_ops.h"
#include "state/account.h"

namespace delta {

struct Session;

class IdleStep {
 public:
  explicit IdleStep(const Account& account) : account_(account) {}

  // On this thread, which watches already. `share`: of the ops, to look at the live bytes in; 0:
  // never.
  void begin(Session& session, int64_t most_bytes, double share);
  void end();  // idempotent, on any thread
  void set_wake(std::function<void(int64_t)> wake) { wake_ = std::move(wake); }

  // Takes in one of the first ops of a step. Whether it is to be observed: always, but for those of
  // an idle step that nothing wakes up.
  bool observes(const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs);
  bool wakes_at(int64_t most_bytes);  // an op that begins; whether it did

  FirstOps first_ops;

 private:
  void look_at_memory(double share);
  void end_first_ops();
  void look_no_more();
  bool wake();

  const Account& account_;
  Session* session_ = nullptr;  // while it is idle
  std::function<void(int64_t)> wake_;
};

void forget_idle_step();  // in a forked child

}  // namespace delta
