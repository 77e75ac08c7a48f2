// Sources: values that no recorded op can make again, from which recipes start.
//
// They are held only while a record can reach them (anchors), copied before they are written to,
// and spoiled where somebody wrote before that.
#pragma once

#include <functional>
#include <utility>

#include "state/session_state.h"

namespace delta {

class Sources : public Part {
 public:
  explicit Sources(SessionState& state) : Part(state) {}

  // Moves on when a recipe that was checked before may not hold any more.
  uint32_t epoch() const { return epoch_; }
  void doubt_recipes() { ++epoch_; }

  // From here on the page holds something that no recorded op made. Under the lock.
  void forget_content(Page& page);
  // Something wrote to the page that we did not see. Recipes that start from its former content are
  // lost: rebuilding them raises, and what is still there is not dropped any more. Under the lock.
  void spoil(Page& page, const at::Tensor& t);
  void spoil_anchor(Page& page);

  // Whether what is about to be overwritten is an anchored source that some record can still reach.
  // Lets go of an anchor that none can. Under the lock.
  bool needs_clone(Page& page);
  // A source that some dropped page needs gets a copy of its own before it is overwritten. Where
  // there is no room for that, what needs it raises when it is rebuilt. Without the lock.
  void clone(const ToClone& sources);

  // How an accelerator's memory is made free for such a copy, more with each attempt; false: there
  // is no more to be had.
  using MakeRoom = std::function<bool(int64_t bytes, int attempt)>;
  void set_make_room(MakeRoom make_room) { make_room_ = std::move(make_room); }

 private:
  c10::DataPtr memory_for(c10::Allocator& allocator, size_t bytes) const;
  c10::Storage storage_to_copy(const Value& value);

  uint32_t epoch_ = 1;
  MakeRoom make_room_;
};

}  // namespace delta
