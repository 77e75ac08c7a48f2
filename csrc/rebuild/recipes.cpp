#include "rebuild/recipes.h"

#include <algorithm>

#include "util/gil.h"

namespace delta {
namespace {

constexpr int64_t kSmallSourceBytes = 65536;  // held as a source, though nobody else holds it

// What a walk has found of a value: Value::mark_state, while Value::mark is that of the walk.
enum State : int8_t { Unseen = 0, Open, Made, Leaf, OutOfReach };

int8_t& state_of(Value& v, uint64_t walk) {
  if (v.mark != walk) {
    v.mark = walk;
    v.mark_state = Unseen;
  }
  return v.mark_state;
}

// Whether all that the op reads will be there when it runs again.
bool are_in_reach(const OpRecord& op, uint64_t walk) {
  return std::all_of(op.inputs.begin(), op.inputs.end(), [&](const ArgumentRef& ref) {
    const int8_t state = ref.needs_content() ? state_of(*ref.value, walk) : Leaf;
    return state == Made || state == Leaf;
  });
}

}  // namespace

// A walk from a value down to its sources.
struct Recipes::Walk {
  uint64_t number;
  Value& root;
  std::vector<Value*> stack;
  std::vector<OpRecord*> ops;  // that would run again
  std::vector<Value*> leaves;  // sources, to be anchored
};

// Puts what the op reads, and what was not seen yet, on the stack; false: there is none of it.
bool Recipes::push_inputs(const OpRecord& op, Walk& walk) {
  const size_t before = walk.stack.size();
  for (const auto& ref : op.inputs) {
    if (ref.needs_content() && state_of(*ref.value, walk.number) == Unseen) {
      walk.stack.push_back(ref.value.get());
    }
  }
  return walk.stack.size() > before;
}

// Of each output by itself: another one of the same op may not repeat.
bool Recipes::may_repeat(const Value& v) const {
  const OpRecord& op = *v.producer;
  return op.repeats && !op.info->is_gone.load(std::memory_order_relaxed) &&
         !evidence_.is_distrusted(v) &&
         op.info->unrepeatable_return != op.outputs[static_cast<size_t>(v.output)].position &&
         std::all_of(op.kept_versions.begin(), op.kept_versions.end(),
                     [](const Versions& each) { return each.unchanged(); });
}

bool Recipes::is_trusted(const Value& v) const {
  return may_repeat(v) &&
         (is_certain(*v.producer) || options_.verify == Verify::Off || evidence_.is_trusted(v));
}

bool Recipes::is_certain(const OpRecord& op) const {
  return op.info->certain && !evidence_.has_mismatched() &&
         (!op.info->factory || options_.device.is_cpu());
}

bool Recipes::anchor(Value& root) {
  if (!root.producer) {
    return false;
  }
  if (const uint64_t now = op_removals(); now != op_removals_) {
    op_removals_ = now;
    sources_.doubt_recipes();  // what was checked may need an op that is gone
  }
  if (is_anchored(*root.producer) && is_trusted(root)) {
    return true;
  }
  Walk walk{++walk_, root, {&root}, {}, {}};
  while (!walk.stack.empty()) {
    Value& v = *walk.stack.back();
    if (state_of(v, walk.number) >= Made || settle(v, walk)) {
      walk.stack.pop_back();
    }
  }
  if (root.mark_state != Made) {
    return false;
  }
  if (!walk.leaves.empty()) {
    pages_.note_anchor();
  }
  for (Value* leaf : walk.leaves) {
    if (!leaf->anchor && !anchor_leaf(*leaf)) {
      return false;
    }
  }
  for (OpRecord* op : walk.ops) {
    op->anchored_in = sources_.epoch();
  }
  return true;
}

// Says what a value is in this walk. False: what it is made from comes first, on top of it.
bool Recipes::settle(Value& v, Walk& walk) {
  int8_t& state = state_of(v, walk.number);
  if (v.anchor) {
    state = v.readable() ? Leaf : OutOfReach;
    return true;
  }
  OpRecord* op = v.producer.get();
  bool reachable = op != nullptr && is_trusted(v);
  if (op != nullptr && !reachable) {
    for (Page* home : {v.home, walk.root.home}) {
      if (home != nullptr && home->tickets > 0 && may_repeat(v)) {
        home->doubts.audit_pending = !op->info->collective;
      }
    }
  }
  const bool is_walked = op != nullptr && op->walk == walk.number;  // for another output of it
  if (reachable && is_walked) {
    reachable = op->in_reach;
  } else if (reachable && !is_anchored(*op)) {
    if (state == Unseen) {
      state = Open;
      if (push_inputs(*op, walk)) {
        return false;
      }
    }
    reachable = are_in_reach(*op, walk.number);
    op->walk = walk.number;
    op->in_reach = reachable;
    if (reachable) {
      walk.ops.push_back(op);
    }
  }
  if (reachable) {
    state = Made;
    return true;
  }
  // Not to be made again: it serves as a leaf if it is there and if holding it costs nothing that
  // would not be there anyway.
  const bool held_anyway =
      v.input || (v.home != nullptr && v.home->tickets > 0) || v.bytes <= kSmallSourceBytes;
  state = &v != &walk.root && held_anyway && can_be_leaf(v) ? Leaf : OutOfReach;
  if (state == Leaf) {
    walk.leaves.push_back(&v);
  }
  return true;
}

// False: it was let go of meanwhile, by another thread.
bool Recipes::anchor_leaf(Value& leaf) {
  if (leaf.home->strong) {
    leaf.set_anchor(leaf.home->strong);
  } else if (auto storage = lock(leaf.home->weak)) {
    leaf.set_anchor(c10::Storage(std::move(storage)));
  } else {
    return false;
  }
  if (!leaf.versions.known()) {
    leaf.versions = leaf.home->versions;
  }
  return true;
}

// Whether what lies in the value's storage is the value, and is going to be as long as that is
// held.
bool Recipes::can_be_leaf(const Value& v) const {
  if (!v.is_alive() || !v.readable()) {
    return false;
  }
  const Page& home = *v.home;
  if (home.doubts.being_written || home.doubts.tainted || home.doubts.resized ||
      !home.content_unchanged()) {
    return false;
  }
  if (home.outside.unguarded && (!v.watched || options_.verify == Verify::Off)) {
    return false;
  }
  c10::Storage storage = home.strong;
  if (!storage) {
    auto alive = lock(home.weak);
    if (!alive) {
      return false;
    }
    storage = c10::Storage(std::move(alive));
  }
  const auto& impl = *storage.unsafeGetStorageImpl();
  const bool holds_it = !home.was_moved(impl) && v.lies_in(impl);
  thread_trash().take(std::move(storage));
  return holds_it;
}

void Recipes::note_dropped(Page& page) {
  page.move_to(Residency::Dropped);
  page.rebuilt = false;
  page.data = nullptr;
  levels_.dropped_now_bytes += page.bytes;
  ++counters_.drops;
  counters_.dropped_bytes += page.bytes;
  events_.emit(EventKind::Dropped, &page, page.bytes, 0, now_.key_of(*page.current));
}

}  // namespace delta
