// Whether a value can be made again, whatever happens to what is there now.
//
// A recipe is the ops that make a value, down to what is held anyway. It is checked down to its
// sources before the first byte of a page is freed, and these are anchored: held for as long as a
// record can reach them.
#pragma once

#include "rebuild/evidence.h"

namespace delta {

// Under the session's lock.
class Recipes : public Part {
 public:
  Recipes(SessionState& state, Sources& sources, Evidence& evidence)
      : Part(state), sources_(sources), evidence_(evidence) {}

  // Whether `root` can be made again, whatever happens to the pages that are resident now. Checks
  // the recipe down to its sources and, if all is well, anchors them. Iterative: recipes are as
  // deep as the program.
  bool anchor(Value& root);
  // Whether an op repeats by construction. On an accelerator a factory's result cannot be watched,
  // so it is compared once instead. After a recomputation that came out different nothing is
  // certain.
  bool is_certain(const OpRecord& op) const;
  void note_dropped(Page& page);  // its bytes go now; from here on it is its recipe

 private:
  struct Walk;

  bool settle(Value& v, Walk& walk);
  static bool push_inputs(const OpRecord& op, Walk& walk);
  bool may_repeat(const Value& v) const;
  bool is_trusted(const Value& v) const;
  bool is_anchored(const OpRecord& op) const { return op.anchored_in == sources_.epoch(); }
  bool can_be_leaf(const Value& v) const;
  bool anchor_leaf(Value& leaf);

  Sources& sources_;
  Evidence& evidence_;
  uint64_t walk_ = 0;
  uint64_t op_removals_ = 0;  // that the epoch knows of
};

}  // namespace delta
