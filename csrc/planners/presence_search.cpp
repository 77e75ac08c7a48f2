#include "planners/presence_search.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace delta::planners {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

constexpr double kLowest = 1.0 / 256.0;  // price to begin with, in units of what a byte takes
constexpr double kHighest = 1e6;
constexpr uint64_t kDoublings = 6;  // from the lowest price of a later turn to the highest
constexpr double kFirstStep = 2.0;  // of the price, after each sweep of the first turn
constexpr double kStep = 1.3;
// Of stretches of values; the longest has a quarter of all values more.
constexpr uint64_t kShortest = 3;
constexpr uint64_t kForced = 4;  // values turned around before a turn, at the most one less
constexpr uint64_t kTurnsForOneMore = 100;  // in vain
constexpr int64_t kTurnsToRestart = 50;     // in vain
constexpr double kNothing = 1e-12;          // seconds: less is no gain

void check_slots(const Slots& slots) {
  const int64_t n = slots.n_values();
  const int64_t k = slots.n_slots();
  check_count(slots.seconds.size(), n);
  for (const auto* column : {&slots.first, &slots.end, &slots.leaves}) {
    check_count(column->size(), n);
  }
  check_count(slots.fixed.size(), n);
  for (const auto* column : {&slots.spare, &slots.rest_room}) {
    check_count(column->size(), k);
  }
  slots.parents.check(n, n);
  slots.asked.check(k, n);
  slots.pinned.check(k, n);
  check_within(slots.first, 0, k);
  check_within(slots.end, 0, k);
  check_within(slots.leaves, -1, static_cast<int64_t>(slots.forward_room.size()) - 1);
  for (int64_t value = 0; value < n; ++value) {
    const int64_t end = slots.end[at_(value)];
    check_within({end}, slots.first[at_(value)], k);
  }
}

}  // namespace

PresenceSearch::PresenceSearch(Slots slots, RerunColumns reruns, std::vector<uint8_t> there)
    : slots_(std::move(slots)), reruns_(std::move(reruns)), there_(std::move(there)) {
  check_slots(slots_);
  check_count(at_(reruns_.n_rows()), slots_.n_values());
  const int64_t n = slots_.n_values();
  const int64_t k = slots_.n_slots();
  offsets_.assign(1, 0);
  for (int64_t i = 0; i < n; ++i) {
    offsets_.push_back(offsets_.back() + slots_.end[at_(i)] - slots_.first[at_(i)] + 1);
  }
  check_count(there_.size(), offsets_.back());
  pinned_.assign(there_.size(), 0);
  for (int64_t slot = 0; slot < k; ++slot) {
    for (const int64_t value : slots_.pinned.of(slot)) {
      check_within({slot}, 0, slots_.end[at_(value)] - 1);
      const int64_t place = slot - slots_.first[at_(value)] + 1;
      if (place > 0) {
        pinned_[at_(offsets_[at_(value)] + place)] = 1;
      }
    }
  }
  slot_.resize(at_(k));
  seen_.assign(at_(n), 0);
  made_in_.assign(at_(n), 0);
  forward_sum_.assign(slots_.forward_room.size(), 0.0);
  forward_price_.assign(slots_.forward_room.size(), 0.0);
  for (int64_t i = 0; i < n; ++i) {
    if (slots_.fixed[at_(i)] == 0) {
      movable_.push_back(i);
    }
  }
}

bool PresenceSearch::is_there(int64_t value, int64_t slot) const {
  const int64_t place = slot - slots_.first[at_(value)] + 1;
  if (place < 0) {
    return true;
  }
  const int64_t at = offsets_[at_(value)] + place;
  return at < offsets_[at_(value + 1)] && there_[at_(at)] != 0;
}

// Whether the rebuilds of a slot find a value.
bool PresenceSearch::is_found(int64_t value, int64_t slot) const {
  if (made_in_[at_(value)] == slot_mark_) {
    return true;
  }
  if (value == who_) {
    return as_ == As::There;
  }
  const int64_t place = slot - slots_.first[at_(value)] + 1;
  if (place <= 0) {
    return place < 0 || there_[at_(offsets_[at_(value)])] != 0;
  }
  const int64_t at = offsets_[at_(value)] + place;
  return at < offsets_[at_(value + 1)] && there_[at_(at)] != 0 && there_[at_(at - 1)] != 0;
}

bool PresenceSearch::is_pinned(int64_t value, int64_t slot) const {
  const int64_t place = slot - slots_.first[at_(value)] + 1;
  const int64_t at = offsets_[at_(value)] + place;
  return place > 0 && at < offsets_[at_(value + 1)] && pinned_[at_(at)] != 0;
}

bool PresenceSearch::is_touched(int64_t value, int64_t slot) const {
  const auto& touched = slot_[at_(slot)].touched;
  return std::binary_search(touched.begin(), touched.end(), value);
}

// `_bring` of the judge.
void PresenceSearch::bring(int64_t value, int64_t slot, Made& into) {
  if (is_found(value, slot)) {
    return;
  }
  ++mark_;
  chain_.assign(1, value);
  stack_.assign(1, value);
  seen_[at_(value)] = mark_;
  while (!stack_.empty()) {
    const int64_t child = stack_.back();
    stack_.pop_back();
    for (const int64_t parent : slots_.parents.of(child)) {
      ++work_;
      if (record_ != nullptr) {
        record_->push_back(parent);
      }
      if (seen_[at_(parent)] != mark_ && !is_found(parent, slot)) {
        seen_[at_(parent)] = mark_;
        chain_.push_back(parent);
        stack_.push_back(parent);
      }
    }
  }
  if (record_ != nullptr) {
    record_->insert(record_->end(), chain_.begin(), chain_.end());
  }
  const auto stays = [&](int64_t made) {
    return made == who_ ? as_ != As::Away : is_there(made, slot);
  };
  const Taken taken = reruns_.run(chain_, stays);
  work_ += taken.ops;
  into.seconds += taken.seconds;
  into.held = std::max(into.held - (early_ ? taken.kept : 0.0), taken.held);
  for (const int64_t made : chain_) {
    if (stays(made)) {
      made_in_[at_(made)] = slot_mark_;
    }
  }
}

// What the rebuilds of a slot take with one value looked at in another way; -1: with none.
PresenceSearch::Made PresenceSearch::make(int64_t slot, int64_t value, As as) {
  ++slot_mark_;
  who_ = value;
  as_ = as;
  Made made{0.0, 0.0};
  reruns_.begin();
  early_ = false;
  for (const int64_t each : slots_.asked.of(slot)) {
    bring(each, slot, made);
  }
  early_ = true;
  const bool back = value >= 0 && as == As::Back;
  bool done = !back;
  for (const int64_t each : slot_[at_(slot)].backs) {
    if (!done && each >= value) {
      bring(value, slot, made);
      done = true;
    }
    if (each != value) {
      bring(each, slot, made);
    }
  }
  if (!done) {
    bring(value, slot, made);
  }
  who_ = -1;
  return made;
}

// About what it takes more to have a value back in a slot whose rebuilds do not touch it: as if it
// were made last.
PresenceSearch::Made PresenceSearch::make_alone(int64_t slot, int64_t value) {
  ++slot_mark_;
  for (const int64_t each : slot_[at_(slot)].backs) {
    made_in_[at_(each)] = slot_mark_;
  }
  who_ = value;
  as_ = As::Back;
  Made made = slot_[at_(slot)].made;
  reruns_.begin();
  early_ = true;
  bring(value, slot, made);
  who_ = -1;
  return made;
}

// Whether a value may as well be back here as later: something else is, or what it is rebuilt from
// goes.
bool PresenceSearch::may_pay(int64_t slot, int64_t value) const {
  if (!slot_[at_(slot)].backs.empty()) {
    return true;
  }
  for (const int64_t parent : slots_.parents.of(value)) {
    if (is_there(parent, slot) && !is_there(parent, slot + 1)) {
      return true;
    }
  }
  return false;
}

double PresenceSearch::over(int64_t slot, double sum, double held) const {
  return std::max(sum + std::max(held - slots_.spare[at_(slot)], 0.0) - slots_.room[at_(slot)],
                  0.0);
}

double PresenceSearch::rest_over(int64_t slot, double sum) const {
  return std::max(sum - slots_.rest_room[at_(slot)], 0.0);
}

double PresenceSearch::forward_over(size_t limit) const {
  return std::max(forward_sum_[limit] - slots_.forward_room[limit], 0.0);
}

// What is too much in forward comes to, if a value has so many bytes more.
double PresenceSearch::forward_penalty(int64_t value, double bytes) const {
  double found = 0.0;
  for (size_t limit = 0; limit < forward_sum_.size(); ++limit) {
    const double more = static_cast<int64_t>(limit) >= slots_.leaves[at_(value)] ? bytes : 0.0;
    found += forward_price_[limit] *
             std::max(forward_sum_[limit] + more - slots_.forward_room[limit], 0.0);
  }
  return found;
}

// Four for each slot of a value: away or there before it (x2), and in it.
void PresenceSearch::find_costs(int64_t value) {
  const int64_t first = slots_.first[at_(value)];
  const int64_t end = slots_.end[at_(value)];
  const double bytes = slots_.bytes[at_(value)];
  const uint8_t* there = &there_[at_(offsets_[at_(value)] + 1)];
  const uint8_t* pinned = &pinned_[at_(offsets_[at_(value)] + 1)];
  costs_.assign(at_(4 * (end - first)), 0.0);
  for (int64_t slot = first; slot < end; ++slot) {
    ++work_;
    const auto place = at_(slot - first);
    const Slot& its = slot_[at_(slot)];
    const double others = its.sum - (there[place] != 0 ? bytes : 0.0);
    Made found = its.made;
    Made away = its.made;
    Made back = its.made;
    bool may_back = true;
    if (is_touched(value, slot) || (pinned[place] != 0 && !its.backs.empty())) {
      found = make(slot, value, As::There);
      away = make(slot, value, As::Away);
      back = make(slot, value, As::Back);
    } else if (pinned[place] != 0 || may_pay(slot, value)) {
      back = make_alone(slot, value);
    } else {
      may_back = false;
    }
    double* cost = &costs_[4 * place];
    const double away_s = away.seconds + its.price * over(slot, others, away.held);
    cost[0] = cost[2] = pinned[place] != 0 ? kInfinite : away_s;
    cost[1] =
        may_back ? back.seconds + its.price * over(slot, others + bytes, back.held) : kInfinite;
    cost[3] = found.seconds + its.price * over(slot, others + bytes, found.held);
    if (slot == 0) {
      continue;
    }
    // The ops since the slot before.
    if (place == 0) {
      continue;  // a value may leave at its first slot, not before
    }
    const double rest = slot_[at_(slot - 1)].rest_sum;
    const bool stays = there[place - 1] != 0 && (there[place] != 0 || pinned[place - 1] != 0);
    const double without = rest - (stays ? bytes : 0.0);
    const double rest_price = slot_[at_(slot - 1)].rest_price;
    const double low = rest_price * rest_over(slot - 1, without);
    const double high = rest_price * rest_over(slot - 1, without + bytes);
    cost[0] += low;
    cost[1] += low;
    cost[2] += pinned[place - 1] != 0 ? high : low;
    cost[3] += high;
  }
}

// Finds the best presence of one value with all others as they are. Returns whether it changed.
bool PresenceSearch::improve(int64_t value) {
  const int64_t begin = offsets_[at_(value)];
  const auto n = at_(offsets_[at_(value + 1)] - begin);
  find_costs(value);
  cost_.assign(2 * n, kInfinite);
  from_.assign(2 * n, 0);
  const bool free = slots_.leaves[at_(value)] >= 0;
  const double bytes = slots_.bytes[at_(value)];
  cost_[1] = 0.0;
  if (free) {
    const bool there = there_[at_(begin)] != 0;
    cost_[0] = forward_penalty(value, there ? -bytes : 0.0);
    cost_[1] = forward_penalty(value, there ? 0.0 : bytes);
  }
  for (size_t p = 1; p < n; ++p) {
    const double* cost = &costs_[4 * (p - 1)];
    for (size_t b = 0; b < 2; ++b) {
      const double from_away = cost_[2 * p - 2] + cost[b];
      const double from_there = cost_[2 * p - 1] + cost[2 + b];
      const bool there = from_there < from_away || (from_there == from_away && b == 1);
      from_[2 * p + b] = there ? 1 : 0;
      cost_[2 * p + b] = there ? from_there : from_away;
    }
  }
  path_.assign(n, 0);
  uint8_t state = cost_[2 * n - 1] < cost_[2 * n - 2] ? 1 : 0;
  const double found = cost_[2 * n - 2 + state];
  for (size_t p = n; p-- > 0;) {
    path_[p] = state;
    state = from_[2 * p + state];
  }
  double now = free ? cost_[there_[at_(begin)]] : 0.0;
  for (size_t p = 1; p < n; ++p) {
    now += costs_[4 * (p - 1) + 2 * there_[at_(begin) + p - 1] + there_[at_(begin) + p]];
  }
  if (!(found < now - kNothing)) {
    return false;
  }
  const double before = objective();
  const std::vector<uint8_t> were(there_.begin() + begin,
                                  there_.begin() + offsets_[at_(value + 1)]);
  put(value, path_);
  if (objective() < before - kNothing) {
    return true;
  }
  put(value, were);
  return false;
}

void PresenceSearch::look_again(int64_t slot) {
  Slot& its = slot_[at_(slot)];
  its.touched.clear();
  record_ = &its.touched;
  its.made = make(slot, -1, As::There);
  record_ = nullptr;
  std::sort(its.touched.begin(), its.touched.end());
  its.touched.erase(std::unique(its.touched.begin(), its.touched.end()), its.touched.end());
}

// Has a value there as `path` says, and keeps all sums.
void PresenceSearch::put(int64_t value, const std::vector<uint8_t>& path) {
  const int64_t first = slots_.first[at_(value)];
  const int64_t end = slots_.end[at_(value)];
  const double bytes = slots_.bytes[at_(value)];
  uint8_t* there = &there_[at_(offsets_[at_(value)])];
  const uint8_t* pinned = &pinned_[at_(offsets_[at_(value)])];
  if (path[0] != there[0]) {
    for (auto limit = at_(slots_.leaves[at_(value)]); limit < forward_sum_.size(); ++limit) {
      add_forward_over(limit, -1.0);
      forward_sum_[limit] += path[0] != 0 ? bytes : -bytes;
      add_forward_over(limit, 1.0);
    }
  }
  uint8_t before_was = there[0];  // in the slot before, until now
  there[0] = path[0];
  for (int64_t slot = first; slot < end; ++slot) {
    const auto p = at_(slot - first + 1);
    const uint8_t was = there[p];
    const bool same = was == path[p] && before_was == path[p - 1];
    if (same) {
      before_was = was;
      continue;
    }
    Slot& its = slot_[at_(slot)];
    add_over(slot, -1.0);
    if (was != path[p]) {
      its.sum += path[p] != 0 ? bytes : -bytes;
    }
    if (p > 1) {
      const bool stayed = before_was != 0 && (was != 0 || pinned[p - 1] != 0);
      const bool stays = path[p - 1] != 0 && (path[p] != 0 || pinned[p - 1] != 0);
      if (stayed != stays) {
        add_rest_over(slot - 1, -1.0);
        slot_[at_(slot - 1)].rest_sum += stays ? bytes : -bytes;
        add_rest_over(slot - 1, 1.0);
      }
    }
    const bool was_back = was != 0 && before_was == 0;
    const bool is_back = path[p] != 0 && path[p - 1] == 0;
    if (was_back != is_back) {
      const auto place = std::lower_bound(its.backs.begin(), its.backs.end(), value);
      if (is_back) {
        its.backs.insert(place, value);
      } else {
        its.backs.erase(place);
      }
    }
    there[p] = path[p];
    if (was_back || is_back || is_touched(value, slot)) {
      seconds_ -= its.made.seconds;
      look_again(slot);
      seconds_ += its.made.seconds;
    }
    add_over(slot, 1.0);
    before_was = was;
  }
}

void PresenceSearch::add_over(int64_t slot, double sign) {
  const Slot& its = slot_[at_(slot)];
  const double bytes = sign * over(slot, its.sum, its.made.held);
  excess_ += bytes;
  penalty_ += its.price * bytes;
}

void PresenceSearch::add_rest_over(int64_t slot, double sign) {
  const Slot& its = slot_[at_(slot)];
  const double bytes = sign * rest_over(slot, its.rest_sum);
  excess_ += bytes;
  penalty_ += its.rest_price * bytes;
}

void PresenceSearch::add_forward_over(size_t limit, double sign) {
  const double bytes = sign * forward_over(limit);
  excess_ += bytes;
  penalty_ += forward_price_[limit] * bytes;
}

void PresenceSearch::set_prices(double price) {
  highest_price_ = price;
  for (Slot& its : slot_) {
    its.price = its.rest_price = price;
  }
  std::fill(forward_price_.begin(), forward_price_.end(), price);
  count();
}

void PresenceSearch::raise_prices(double step) {
  const auto raise = [&](double& price, double bytes) {
    if (all_rise_ || bytes > 0) {
      price *= step;
      highest_price_ = std::max(highest_price_, price);
    }
  };
  for (int64_t slot = 0; slot < slots_.n_slots(); ++slot) {
    Slot& its = slot_[at_(slot)];
    raise(its.price, over(slot, its.sum, its.made.held));
    raise(its.rest_price, rest_over(slot, its.rest_sum));
  }
  for (size_t limit = 0; limit < forward_sum_.size(); ++limit) {
    raise(forward_price_[limit], forward_over(limit));
  }
  count();
}

// Sums everything up anew.
void PresenceSearch::count() {
  seconds_ = excess_ = penalty_ = 0.0;
  for (size_t limit = 0; limit < forward_sum_.size(); ++limit) {
    add_forward_over(limit, 1.0);
  }
  for (int64_t slot = 0; slot < slots_.n_slots(); ++slot) {
    seconds_ += slot_[at_(slot)].made.seconds;
    add_over(slot, 1.0);
    add_rest_over(slot, 1.0);
  }
}

void PresenceSearch::begin() {
  begun_ = true;
  double seconds = 0.0;
  double bytes = 1.0;
  for (int64_t value = 0; value < slots_.n_values(); ++value) {
    const int64_t first = slots_.first[at_(value)];
    const uint8_t* there = &there_[at_(offsets_[at_(value)])];
    const uint8_t* pinned = &pinned_[at_(offsets_[at_(value)])];
    const double own = slots_.bytes[at_(value)];
    if (slots_.fixed[at_(value)] == 0) {
      seconds += slots_.seconds[at_(value)];
      bytes += own;
    }
    if (slots_.leaves[at_(value)] >= 0 && there[0] != 0) {
      for (auto limit = at_(slots_.leaves[at_(value)]); limit < forward_sum_.size(); ++limit) {
        forward_sum_[limit] += own;
      }
    }
    for (int64_t slot = first; slot < slots_.end[at_(value)]; ++slot) {
      const auto p = at_(slot - first + 1);
      Slot& its = slot_[at_(slot)];
      if (there[p] != 0) {
        its.sum += own;
      }
      if (p > 1 && there[p - 1] != 0 && (there[p] != 0 || pinned[p - 1] != 0)) {
        slot_[at_(slot - 1)].rest_sum += own;
      }
      if (there[p] != 0 && there[p - 1] == 0) {
        its.backs.push_back(value);
      }
    }
  }
  for (int64_t slot = 0; slot < slots_.n_slots(); ++slot) {
    look_again(slot);
  }
  count();
  best_there_ = there_;
  best_seconds_ = seconds_;
  best_excess_ = excess_;
  unit_ = (seconds != 0.0 ? seconds : 1.0) / bytes;  // prices must rise, also where nothing costs
}

// Has each value at its best once, in one direction. Returns whether any changed.
bool PresenceSearch::sweep() {
  const auto n = static_cast<int64_t>(movable_.size());
  bool any = false;
  const bool down = random(2) != 0;
  const auto shift = static_cast<int64_t>(random(static_cast<uint64_t>(n)));
  for (int64_t index = 0; index < n; ++index) {
    const int64_t place = (index + shift) % n;
    const int64_t value = movable_[at_(down ? n - 1 - place : place)];
    if (value != forced_ && improve(value)) {
      any = true;
    }
  }
  return any;
}

uint64_t PresenceSearch::random(uint64_t most) {
  state_ = state_ * 6364136223846793005ULL + 1442695040888963407ULL;
  return (state_ >> 33) % most;
}

// Turns a value's presence around over a stretch of slots, if nothing asks for it in the first one
// that is drawn.
void PresenceSearch::force(int64_t value) {
  const int64_t begin = offsets_[at_(value)];
  const int64_t n = slots_.end[at_(value)] - slots_.first[at_(value)] + 1;
  const int64_t least = slots_.leaves[at_(value)] >= 0 ? 0 : 1;
  if (n <= least) {
    return;
  }
  const auto at = least + static_cast<int64_t>(random(static_cast<uint64_t>(n - least)));
  if (pinned_[at_(begin + at)] != 0) {
    return;
  }
  int64_t low = at;
  int64_t high = at;
  const uint8_t state = there_[at_(begin + at)];
  const auto fits = [&](int64_t p) {
    return p >= least && p < n && there_[at_(begin + p)] == state && pinned_[at_(begin + p)] == 0;
  };
  while (fits(low - 1)) {
    --low;
  }
  while (fits(high + 1)) {
    ++high;
  }
  if (random(2) != 0) {
    low = low + static_cast<int64_t>(random(static_cast<uint64_t>(at - low + 1)));
    high = at + static_cast<int64_t>(random(static_cast<uint64_t>(high - at + 1)));
  }
  std::vector<uint8_t> path(there_.begin() + begin, there_.begin() + offsets_[at_(value + 1)]);
  for (int64_t p = low; p <= high; ++p) {
    path[at_(p)] = state != 0 ? 0 : 1;
  }
  put(value, path);
  forced_ = value;
}

// Has values that are made one after the other all there, or away wherever they may be.
void PresenceSearch::put_stretch() {
  const auto n = static_cast<uint64_t>(movable_.size());
  const uint64_t length = std::min(n, kShortest + random(std::max<uint64_t>(n / 4, 1)));
  const uint64_t begin = random(n - length + 1);
  const bool there = random(2) != 0;
  for (uint64_t index = begin; index < begin + length; ++index) {
    const int64_t value = movable_[index];
    const int64_t low = offsets_[at_(value)];
    const int64_t high = offsets_[at_(value + 1)];
    std::vector<uint8_t> path(pinned_.begin() + low, pinned_.begin() + high);
    if (there) {
      path.assign(path.size(), 1);
    }
    if (slots_.leaves[at_(value)] < 0) {
      path[0] = 1;
    }
    put(value, path);
  }
}

void PresenceSearch::keep_if_better() {
  if (excess_ < best_excess_ || (excess_ == best_excess_ && seconds_ < best_seconds_)) {
    best_there_ = there_;
    best_seconds_ = seconds_;
    best_excess_ = excess_;
    in_vain_ = 0;
  }
}

void PresenceSearch::go_back() {
  for (const int64_t value : movable_) {
    const int64_t low = offsets_[at_(value)];
    const int64_t high = offsets_[at_(value + 1)];
    if (!std::equal(there_.begin() + low, there_.begin() + high, best_there_.begin() + low)) {
      put(value, {best_there_.begin() + low, best_there_.begin() + high});
    }
  }
  count();
}

// With everything there, and low prices.
void PresenceSearch::begin_anew(double step) {
  for (const int64_t value : movable_) {
    put(value, std::vector<uint8_t>(at_(offsets_[at_(value + 1)] - offsets_[at_(value)]), 1));
  }
  set_prices(unit_ * kLowest);
  step_ = step;
}

void PresenceSearch::begin_first_turn() {
  begin();
  begin_anew(kFirstStep);
}

void PresenceSearch::begin_turn() {
  go_back();
  step_ = kStep;
  ++in_vain_;
  all_rise_ = random(2) != 0;
  if (in_vain_ % kTurnsToRestart == 0) {
    begin_anew(kStep);
    return;
  }
  const auto halvings = static_cast<int>(random(kDoublings)) + 1;
  set_prices(unit_ * std::ldexp(1.0 + static_cast<double>(random(1000)) / 1000.0, -halvings));
  if (random(2) != 0) {
    put_stretch();
    return;
  }
  const uint64_t most = kForced + static_cast<uint64_t>(in_vain_) / kTurnsForOneMore;
  for (uint64_t left = random(most); left > 0; --left) {
    force(movable_[at_(static_cast<int64_t>(random(movable_.size())))]);
  }
}

// A sweep, and a higher price after it; until all fits, and nothing gets any better.
void PresenceSearch::go_on_with_turn() {
  const bool any = sweep();
  forced_ = -1;
  if ((excess_ <= 0 && !any) || highest_price_ > kHighest * unit_) {
    count();
    keep_if_better();
    in_turn_ = false;
    return;
  }
  raise_prices(any ? step_ : step_ * step_);
}

bool PresenceSearch::go_on(int64_t most_work, int64_t most_in_vain) {
  const int64_t until = work_ + most_work;
  while (work_ < until && !movable_.empty() && in_vain_ < most_in_vain) {
    if (in_turn_) {
      go_on_with_turn();
      continue;
    }
    if (begun_) {
      begin_turn();
    } else {
      begin_first_turn();
    }
    in_turn_ = true;
  }
  return movable_.empty() || in_vain_ >= most_in_vain;
}

Found PresenceSearch::best() {
  if (!begun_) {
    begin();
  }
  go_back();
  Found found{seconds_, excess_, -kInfinite, there_};
  for (size_t limit = 0; limit < forward_sum_.size(); ++limit) {
    found.most = std::max(found.most, forward_sum_[limit] - slots_.forward_room[limit]);
  }
  for (int64_t slot = 0; slot < slots_.n_slots(); ++slot) {
    const Slot& its = slot_[at_(slot)];
    const double passing = std::max(its.made.held - slots_.spare[at_(slot)], 0.0);
    found.most = std::max(found.most, its.sum + passing - slots_.room[at_(slot)]);
    found.most = std::max(found.most, its.rest_sum - slots_.rest_room[at_(slot)]);
  }
  return found;
}

}  // namespace delta::planners
