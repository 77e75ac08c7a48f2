#include "simulate/virtual_step.h"

#include <algorithm>
#include <set>
#include <stdexcept>

#include "util/rounding.h"
#include "walk/follow.h"
#include "walk/tuning.h"

namespace delta {
namespace {

size_t at(int64_t index) { return static_cast<size_t>(index); }

void require(bool holds, const char* what) {
  if (!holds) {
    throw std::invalid_argument(what);
  }
}

void check_lists(const ListsOf& lists, int64_t count, int64_t most) {
  require(static_cast<int64_t>(lists.offsets.size()) == count + 1 && lists.offsets.front() == 0 &&
              lists.offsets.back() == static_cast<int64_t>(lists.items.size()) &&
              std::is_sorted(lists.offsets.begin(), lists.offsets.end()),
          "offsets do not cut their column into pieces");
  require(std::all_of(lists.items.begin(), lists.items.end(),
                      [most](int64_t each) { return each >= 0 && each < most; }),
          "a number is of nothing that there is");
}

ListsOf lists_of(const std::vector<std::vector<int64_t>>& each) {
  ListsOf lists;
  lists.offsets.push_back(0);
  for (const auto& list : each) {
    lists.items.insert(lists.items.end(), list.begin(), list.end());
    lists.offsets.push_back(static_cast<int64_t>(lists.items.size()));
  }
  return lists;
}

}  // namespace

void StepColumns::check() const {
  const size_t ops = op_tick.size();
  require(op_seconds.size() == ops && again_seconds.size() == ops && ordinary_bytes.size() == ops &&
              behind_bytes.size() == ops && watermark_bytes.size() == ops && backward.size() == ops,
          "the columns of ops have different lengths");
  require(std::is_sorted(op_tick.begin(), op_tick.end()), "ops are not in order");
  require(value_op.size() == value_bytes.size(), "the columns of values have different lengths");
  const auto values = static_cast<int64_t>(value_op.size());
  require(std::all_of(value_op.begin(), value_op.end(),
                      [this](int64_t op) { return op >= 0 && op < n_ops(); }),
          "a value is made by no op");
  require(saved_at.size() == saved.size() && alone_at.size() == saved.size() &&
              released_at.size() == saved.size() && possible.size() == saved.size(),
          "the columns of saved values have different lengths");
  require(std::all_of(saved.begin(), saved.end(),
                      [values](int64_t value) { return value >= 0 && value < values; }),
          "what is saved is no value");
  require(std::set<int64_t>(saved.begin(), saved.end()).size() == saved.size(),
          "a value is saved twice");
  check_lists(reads, n_ops(), values);
  check_lists(uses, n_saved(), ticks + 1);
  check_lists(recipe_ops, n_saved(), n_ops());
  check_lists(parents, n_saved(), n_saved());
}

// What runs again for one page.
struct VirtualStep::Rerun {
  std::vector<int64_t> ops;
  std::vector<Page*> wanted;  // below the device: it starts from them
  std::vector<int64_t> last;  // of each value that the ops read: place of the last one among them
  std::vector<Page*> pinned;
};

VirtualStep::VirtualStep(StepColumns step, VirtualDevice device, std::shared_ptr<const Plan> plan)
    : step_(std::move(step)),
      device_(device),
      plan_(std::move(plan)),
      out_(device.out_bytes_per_s),
      in_(device.in_bytes_per_s) {
  step_.check();
  const int64_t values = static_cast<int64_t>(step_.value_op.size());
  require(plan_ == nullptr || static_cast<int64_t>(plan_->fingerprint.size()) == values,
          "the plan is of another step");
  std::vector<std::vector<int64_t>> makes(at(step_.n_ops()));
  for (int64_t value = 0; value < values; ++value) {
    makes[at(step_.value_op[at(value)])].push_back(value);
  }
  makes_ = lists_of(makes);
  index_of_.assign(at(values), -1);
  packs_.resize(at(step_.n_ops()));
  asked_.resize(at(step_.n_ops()));
  const auto op_of = [this](int64_t tick) {
    const auto& ticks = step_.op_tick;
    return std::upper_bound(ticks.begin(), ticks.end(), tick) - ticks.begin() - 1;
  };
  for (int64_t index = 0; index < step_.n_saved(); ++index) {
    const int64_t value = step_.saved[at(index)];
    index_of_[at(value)] = index;
    const int64_t made_by = step_.value_op[at(value)];
    packs_[at(std::max(op_of(step_.saved_at[at(index)]), made_by))].push_back(index);
    int64_t last_use = -1;
    for (const int64_t tick : step_.uses.of(index)) {
      if (const int64_t op = op_of(tick); op >= made_by) {
        asked_[at(op)].push_back({tick, Ask::Use, index});
      }
      last_use = std::max(last_use, tick);
    }
    const int64_t released = step_.released_at[at(index)];
    if (const int64_t op = op_of(released); op >= made_by && released <= step_.ticks) {
      const Ask what = last_use < released ? Ask::ReleaseBefore : Ask::Release;
      asked_[at(op)].push_back({released, what, index});
    }
  }
  for (auto& asked : asked_) {
    std::stable_sort(asked.begin(), asked.end(), [](const Asked& a, const Asked& b) {
      return a.tick != b.tick ? a.tick < b.tick : a.what < b.what;
    });
  }
}

// ---------------------------------------------------------------- the step

VirtualTotals VirtualStep::run() {
  begin_step();
  const double begin_s = clock_s_;
  for (int64_t op = 0; op < step_.n_ops(); ++op) {
    if (op > 0 && as_written()) {
      after_op();
    }
    boundary(op);
    const double op_begin_s = clock_s_;
    note_peak(live_bytes() + step_.watermark_bytes[at(op)]);
    clock_s_ += step_.op_seconds[at(op)];
    log(LogKind::Op, op, live_bytes(), op_begin_s, clock_s_);
    behind(op);
  }
  reap();
  if (as_written()) {
    schedule_.end(/*still=*/true, *this);
  }
  now_.tick = now_.begin_tick + step_.ticks;
  emit(EventKind::Step, nullptr, 0, 0, -1);
  totals_.seconds = clock_s_ - begin_s;
  return totals_;
}

void VirtualStep::begin_step() {
  totals_ = VirtualTotals();
  log_.clear();
  now_.begin_tick = now_.tick;
  now_.phase = Phase::Forward;
  for (auto& each : pages_) {
    if (each.managed) {
      release(each);  // autograd kept it to the end of its step
    }
  }
  pages_.assign(at(step_.n_saved()), Page());
  candidates_.clear();
  in_use_.clear();
  coming_.clear();
  write_backs_.clear();
  first_id_ += static_cast<int64_t>(index_of_id_.size());
  index_of_id_.clear();
  away_bytes_ = dropped_bytes_ = passing_bytes_ = host_used_bytes_ = 0;
  for (int64_t index = 0; index < step_.n_saved(); ++index) {
    Page& each = pages_[at(index)];
    each.index = index;
    each.value = step_.saved[at(index)];
    each.bytes = step_.value_bytes[at(each.value)];
  }
  if (as_written()) {
    schedule_.begin(*plan_);
  }
}

// As OpObserver does at the begin of an op.
void VirtualStep::boundary(int64_t op) {
  now_.tick = now_.begin_tick + step_.op_tick[at(op)];
  now_.phase = step_.backward[at(op)] != 0 ? Phase::Backward : Phase::Forward;
  level_bytes_ = step_.ordinary_bytes[at(op)];
  const int64_t need = step_.watermark_bytes[at(op)];
  const bool tight = device_.budget_bytes > 0 && live_bytes() + need > device_.budget_bytes;
  if (as_written()) {
    before_op();
  }
  if (device_.swaps()) {
    tend_lanes(need);
  }
  if (tight) {
    look_ahead(need);
  }
}

void VirtualStep::behind(int64_t op) {
  for (const int64_t index : packs_[at(op)]) {
    pack(index);
  }
  level_bytes_ = step_.behind_bytes[at(op)];
  const int64_t least =
      std::min(level_bytes_, op + 1 < step_.n_ops() ? step_.ordinary_bytes[at(op + 1)] : 0);
  bool first = true;
  for (const auto& asked : asked_[at(op)]) {
    Page& each = pages_[at(asked.index)];
    if (asked.what != Ask::Use) {
      level_bytes_ = std::max(level_bytes_ - each.bytes, least);
      if (each.managed) {
        release(each);
      }
      continue;
    }
    if (first) {  // the node that asked before has ended
      for (Page* used : in_use_) {
        --used->pins;
      }
      in_use_.clear();
      first = false;
    }
    ask(each);
  }
}

void VirtualStep::pack(int64_t index) {
  Page& each = pages_[at(index)];
  if (each.bytes < device_.min_bytes) {
    return;
  }
  const double again_s = step_.op_seconds[at(step_.value_op[at(each.value)])];
  const double bytes = static_cast<double>(each.bytes);
  each.id = first_id_ + static_cast<int64_t>(index_of_id_.size());
  index_of_id_.push_back(index);
  each.managed = true;
  each.tickets = 1;
  each.place = Place::Device;
  each.packed_at = each.last_use = now_.tick;
  each.exit = default_exit(device_.drops, device_.swaps(), again_s,
                           device_.swaps() ? bytes * in_.seconds_per_byte() : 0);
  each.weight = default_weight(device_.default_weight, each.bytes, again_s);
  if (plan_ != nullptr) {
    follow(*plan_, at(each.value), now_, each);
  }
  emit(EventKind::Packed, &each, each.bytes, again_s, each.value);
  for (const int64_t value : step_.reads.of(step_.value_op[at(each.value)])) {
    const int64_t source = index_of_[at(value)];
    if (source >= 0 && source != index && pages_[at(source)].managed) {
      emit(EventKind::Edge, &each, 0, 0, pages_[at(source)].id);
    }
  }
  add_candidate(each);
  write_backs_.add(each);
}

void VirtualStep::ask(Page& each) {
  if (each.managed) {
    while (each.place != Place::Device) {
      if (each.place == Place::Nowhere) {
        rebuild(each, /*early=*/false);
      } else {
        bring_back(each);
      }
    }
    each.last_use = now_.tick;
    now_.frontier = each.packed_at;
    emit(EventKind::Used, &each, each.bytes, 0, each.value);
  }
  ++each.pins;
  in_use_.push_back(&each);
}

void VirtualStep::release(Page& each) {
  if (each.place == Place::Device) {
    remove_candidate(each);
  } else if (each.place == Place::Nowhere || each.place == Place::Below) {
    away_bytes_ -= each.bytes;
    dropped_bytes_ -= each.place == Place::Nowhere ? each.bytes : 0;
    if (each.place == Place::Below) {
      returns_.remove(each);
    }
  }
  forget_copy(each);
  emit(EventKind::Released, &each, each.bytes, 0, each.value);
  each.arrival.reset();
  each.managed = false;
  each.let_go_away = each.place != Place::Device;
  each.tickets = 0;
  each.place = Place::Lost;
}

// ---------------------------------------------------------------- at a boundary

void VirtualStep::after_op() {
  while (Row* row = schedule_.next_to_come(now_, *this)) {
    Page& each = page(*row);
    if (each.place == Place::Nowhere) {
      rebuild(each, /*early=*/true);
    } else if (device_.budget_bytes == 0 || look_ahead(each.bytes) == 0) {
      begin_in(each);
    }
  }
}

void VirtualStep::before_op() {
  if (!schedule_.note_ended(now_)) {
    return;
  }
  reap();
  std::vector<int64_t> due = schedule_.take_due();
  due.erase(std::remove_if(due.begin(), due.end(),
                           [this](int64_t each) { return schedule_.leave(each, now_, *this); }),
            due.end());
  schedule_.put_back(due);
}

void VirtualStep::tend_lanes(int64_t need_bytes) {
  reap();
  const bool early = is_early(now_, live_bytes(), device_.budget_bytes);
  const bool idle = out_.queued_bytes(clock_s_) == 0;
  write_backs_.go_on(plan_ != nullptr, early && idle, *this);
  const int64_t room = device_.budget_bytes - live_bytes() - need_bytes - kTuning.slack_bytes;
  const LaneLoad lane{in_.queued_bytes(clock_s_), in_.seconds_per_byte()};
  for (Row* row : returns_.due(now_, as_written(), room, {lane})) {
    begin_in(page(*row));
  }
}

// Returns what is missing.
int64_t VirtualStep::look_ahead(int64_t need_bytes) {
  if (pump_ && plan_ == nullptr && now_.tick - last_pump_tick_ >= kTuning.ask_interval_ticks) {
    last_pump_tick_ = now_.tick;
    pump_(need_bytes);
  }
  const int64_t room = short_by(live_bytes(), need_bytes, device_.budget_bytes);
  if (device_.budget_bytes == 0 || room <= 0) {
    return 0;
  }
  live_before_ = live_bytes();
  const size_t most_turns = 2 * candidates_.size() + 8 + (in_.first() ? pages_.size() : 0);
  const int64_t freed = make_room(room, device_.swaps(), most_turns, *this);
  if (freed < room) {
    ++totals_.shortfalls;
    totals_.shortfall_bytes = std::max(totals_.shortfall_bytes, room - freed);
    emit(EventKind::Shortfall, nullptr, room - freed, 0, -1);
  }
  return std::max<int64_t>(0, room - kTuning.slack_bytes - freed);
}

// ---------------------------------------------------------------- what is decided, carried out

void VirtualStep::reap() {
  coming_.clear();
  if (!device_.swaps()) {
    return;
  }
  for (const auto& copy : out_.take_ended(clock_s_)) {
    if (copy->forgotten) {
      give_back(*copy);
    }
    if (!copy->cancelled) {
      log(LogKind::CopyOut, copy->value, copy->bytes, copy->begin_s, copy->end_s);
    }
  }
  for (const auto& copy : in_.take_ended(clock_s_)) {
    log(LogKind::CopyIn, copy->value, copy->bytes, copy->begin_s, copy->end_s);
    Page& each = pages_[at(index_of_[at(copy->value)])];
    if (each.arrival == copy) {
      each.arrival.reset();
      each.place = Place::Device;
      each.retry_tick = 0;
      ++totals_.swap_ins;
      emit(EventKind::SwappedIn, &each, each.bytes, copy->end_s - copy->begin_s, each.value);
      add_candidate(each);
    }
  }
}

void VirtualStep::offer(VictimQueue& victims) {
  victims.reserve(candidates_.size());
  for (Page* each : candidates_) {
    if (is_due(*each, now_.tick, device_.swaps()) && is_alone(*each)) {
      const int64_t next = device_.distance == Distance::NextUse ? next_use_of(*each) : -1;
      victims.offer(*each, distance(device_.distance, next, now_, *each));
    }
  }
}

bool VirtualStep::free_clean(Row& row) {
  Page& each = page(row);
  if (each.candidate < 0 || !is_alone(each) || each.copy == nullptr ||
      !each.copy->ended(clock_s_)) {
    return false;
  }
  remove_candidate(each);
  each.place = Place::Below;
  ++each.frees;
  away_bytes_ += each.bytes;
  ++totals_.swap_outs;
  totals_.swapped_out_bytes += each.bytes;
  returns_.add(each, next_use_of(each), now_, as_written());
  emit(EventKind::SwappedOut, &each, each.bytes, 0, each.value);
  log(LogKind::Free, each.value, each.bytes, clock_s_, clock_s_);
  return true;
}

bool VirtualStep::drop(Row& row) {
  Page& each = page(row);
  if (each.candidate < 0 || !device_.drops || each.retry_tick > now_.tick || !is_alone(each)) {
    return false;
  }
  if (step_.possible[at(each.index)] == 0) {
    each.retry_tick = now_.tick + kTuning.retry_ticks;
    return false;
  }
  forget_copy(each);
  remove_candidate(each);
  each.place = Place::Nowhere;
  away_bytes_ += each.bytes;
  dropped_bytes_ += each.bytes;
  ++totals_.drops;
  totals_.dropped_bytes += each.bytes;
  emit(EventKind::Dropped, &each, each.bytes, 0, each.value);
  log(LogKind::Drop, each.value, each.bytes, clock_s_, clock_s_);
  return true;
}

bool VirtualStep::is_refused(const Row& row) {
  return page(row).refused_at >= 0 && page(row).refused_at == returned_;
}

bool VirtualStep::write_back(Row& row) {
  Page& each = page(row);
  if (!device_.swaps() || each.copy != nullptr || each.candidate < 0 || !is_alone(each) ||
      is_refused(each)) {
    if (each.copy != nullptr) {
      coming_.push_back(each.copy);
    }
    return each.copy != nullptr;
  }
  for (Page* other : candidates_) {  // what came back can do without its copy
    if (host_used_bytes_ + each.bytes > device_.host_bytes && other->copy != nullptr &&
        other->copy->ended(clock_s_) && other->frees > 0) {
      forget_copy(*other);
    }
  }
  if (host_used_bytes_ + each.bytes > device_.host_bytes) {
    each.refused_at = returned_;
    return false;
  }
  host_used_bytes_ += each.bytes;
  each.copy = out_.submit(each.value, each.bytes, clock_s_);
  coming_.push_back(each.copy);
  return true;
}

bool VirtualStep::wait() {
  if (!coming_.empty()) {
    wait_until(out_.end_of(*coming_.front()), totals_.out_stall_s);
    return true;
  }
  if (const VirtualCopyPtr first = in_.first()) {
    wait_until(in_.end_of(*first), totals_.in_stall_s);
    return true;
  }
  return false;
}

Row* VirtualStep::find(int64_t id) {
  Page* each = page_with(id);
  return each != nullptr && each->managed && each->copy == nullptr ? each : nullptr;
}

Row* VirtualStep::row_of(int64_t value) {
  const int64_t index = index_of_[at(value)];
  return index >= 0 && pages_[at(index)].managed ? &pages_[at(index)] : nullptr;
}

void VirtualStep::enter(Row& row) { follow(*plan_, at(page(row).value), now_, row); }

void VirtualStep::time_return(Row& row, int64_t tick) {
  const bool below = page(row).place == Place::Below;
  if (below) {
    returns_.remove(row);
  }
  row.return_tick = tick;
  if (below) {
    returns_.add(row, next_use_of(page(row)), now_, as_written());
  }
}

bool VirtualStep::free_or_copy(Row& row) {
  if (free_clean(row)) {
    return true;
  }
  write_back(row);
  return false;
}

// ---------------------------------------------------------------- coming back

void VirtualStep::begin_in(Page& each) {
  returns_.remove(each);
  if (as_written()) {
    each.return_tick = -1;
  }
  each.place = Place::OnTheWay;
  away_bytes_ -= each.bytes;
  note_peak(live_bytes());
  each.arrival = in_.submit(each.value, each.bytes, clock_s_);
}

void VirtualStep::bring_back(Page& each) {
  if (each.place == Place::Below) {
    look_ahead(each.bytes);
    begin_in(each);
  }
  wait_until(in_.end_of(*each.arrival), totals_.in_stall_s);
  reap();
}

// False: an early one, for which there is no room.
bool VirtualStep::rebuild(Page& each, bool early) {
  std::vector<Page*> held;  // what came back for it: else making room for one would free another
  Rerun rerun;
  while (!collect(each, rerun)) {
    for (Page* wanted : rerun.wanted) {
      if (wanted->place == Place::Below) {
        look_ahead(wanted->bytes);
        begin_in(*wanted);
      }
    }
    for (Page* wanted : rerun.wanted) {
      while (is_below(*wanted)) {
        bring_back(*wanted);
      }
      if (wanted->place == Place::Device) {  // else it was dropped meanwhile, for another of them
        ++wanted->pins;
        held.push_back(wanted);
      }
    }
    rerun = Rerun();
  }
  const bool whole = run_again(rerun, each, early);
  for (Page* back : held) {
    --back->pins;
  }
  return whole;
}

// Fills the rerun with the ops that make a page again from what is there. False: some of that has
// to be brought back first.
bool VirtualStep::collect(Page& root, Rerun& rerun) {
  std::vector<uint8_t> seen(at(step_.n_saved()), 0);
  std::vector<int64_t> todo{root.index};
  seen[at(root.index)] = 1;
  while (!todo.empty()) {
    const int64_t index = todo.back();
    todo.pop_back();
    const auto ops = step_.recipe_ops.of(index);
    rerun.ops.insert(rerun.ops.end(), ops.begin(), ops.end());
    for (const int64_t parent : step_.parents.of(index)) {
      Page& from = pages_[at(parent)];
      if (seen[at(parent)] != 0) {
        continue;
      }
      seen[at(parent)] = 1;
      if (is_below(from)) {
        rerun.wanted.push_back(&from);
      } else if (from.place == Place::Nowhere || from.let_go_away ||
                 step_.released_at[at(parent)] < now_.position()) {
        todo.push_back(parent);
      } else if (from.managed) {
        rerun.pinned.push_back(&from);
      }
    }
  }
  std::sort(rerun.ops.begin(), rerun.ops.end());
  rerun.ops.erase(std::unique(rerun.ops.begin(), rerun.ops.end()), rerun.ops.end());
  rerun.last.assign(step_.value_op.size(), -1);
  for (size_t i = 0; i < rerun.ops.size(); ++i) {
    for (const int64_t value : step_.reads.of(rerun.ops[i])) {
      rerun.last[at(value)] = static_cast<int64_t>(i);
    }
  }
  return rerun.wanted.empty();
}

// Bytes that an op has to find when it runs again: rounding can be refused too.
int64_t VirtualStep::need_again(int64_t op) const {
  int64_t bytes = step_.watermark_bytes[at(op)];
  for (const int64_t value : makes_.of(op)) {
    bytes += device_.is_cpu ? most_rounding_bytes(step_.value_bytes[at(value)]) : 0;
  }
  return bytes;
}

bool VirtualStep::run_again(Rerun& rerun, Page& root, bool early) {
  const double begin_s = clock_s_;
  const double stalled_s = totals_.in_stall_s + totals_.out_stall_s;
  for (Page* each : rerun.pinned) {
    ++each->pins;
  }
  std::vector<std::vector<Page*>> unpinned(rerun.ops.size());
  for (Page* each : rerun.pinned) {
    const int64_t last = rerun.last[at(each->value)];
    unpinned[last < 0 ? 0 : at(last)].push_back(each);
  }
  std::vector<int64_t> going(rerun.ops.size() + 1, 0);  // bytes, behind each of the ops
  bool whole = true;
  for (size_t i = 0; i < rerun.ops.size(); ++i) {
    const int64_t op = rerun.ops[i];
    const int64_t watermark = step_.watermark_bytes[at(op)];
    if (whole && look_ahead(need_again(op)) > 0 && early) {
      whole = false;
    }
    if (whole) {
      note_peak(live_bytes() + watermark);
      clock_s_ += step_.again_seconds[at(op)];
      ++totals_.replayed_ops;
      for (const int64_t value : makes_.of(op)) {
        const int64_t index = index_of_[at(value)];
        Page* each = index >= 0 ? &pages_[at(index)] : nullptr;
        const bool kept =
            each == &root || !as_written() || plan_->covers(at(value), now_.position());
        const int64_t last = rerun.last[at(value)];
        if (each != nullptr && each->place == Place::Nowhere && kept) {
          install(*each);
          if (last > static_cast<int64_t>(i)) {
            ++each->pins;
            unpinned[at(last)].push_back(each);
          }
        } else if (last > static_cast<int64_t>(i)) {
          passing_bytes_ += step_.value_bytes[at(value)];
          going[at(last)] += step_.value_bytes[at(value)];
        }
      }
    }
    passing_bytes_ -= going[i];
    for (Page* each : unpinned[i]) {
      --each->pins;
    }
  }
  const double waited_s = totals_.in_stall_s + totals_.out_stall_s - stalled_s;
  totals_.rebuild_s += clock_s_ - begin_s - waited_s;
  log(LogKind::Rebuild, root.value, root.bytes, begin_s, clock_s_);
  return whole;
}

void VirtualStep::install(Page& each) {
  each.place = Place::Device;
  each.rebuilt = true;
  each.retry_tick = 0;
  away_bytes_ -= each.bytes;
  dropped_bytes_ -= each.bytes;
  ++totals_.rebuilds;
  emit(EventKind::Rebuilt, &each, each.bytes,
       step_.again_seconds[at(step_.value_op[at(each.value)])], each.value);
  if (plan_ != nullptr) {
    follow(*plan_, at(each.value), now_, each);
  }
  add_candidate(each);
}

// ---------------------------------------------------------------- small things

bool VirtualStep::is_alone(const Page& each) const {
  return each.pins == 0 && now_.position() >= step_.alone_at[at(each.index)];
}

int64_t VirtualStep::next_use_of(Page& each) const {
  return plan_ == nullptr ? -1 : next_use(*plan_, at(each.value), now_, each);
}

void VirtualStep::forget_copy(Page& each) {
  if (each.copy == nullptr) {
    return;
  }
  if (out_.cancel(*each.copy, clock_s_) || each.copy->ended(clock_s_)) {
    give_back(*each.copy);
  } else {
    each.copy->forgotten = true;  // it runs to its end, and holds its block until then
  }
  each.copy.reset();
}

void VirtualStep::give_back(VirtualCopy& copy) {
  copy.forgotten = false;
  host_used_bytes_ -= copy.bytes;
  ++returned_;
}

void VirtualStep::add_candidate(Page& each) {
  each.candidate = static_cast<int64_t>(candidates_.size());
  candidates_.push_back(&each);
}

void VirtualStep::remove_candidate(Page& each) {
  if (each.candidate < 0) {
    return;
  }
  candidates_[at(each.candidate)] = candidates_.back();
  candidates_.back()->candidate = each.candidate;
  candidates_.pop_back();
  each.candidate = -1;
}

void VirtualStep::wait_until(double then_s, double& stall_s) {
  stall_s += std::max(0.0, then_s - clock_s_);
  clock_s_ = std::max(clock_s_, then_s);
}

VirtualStep::Page* VirtualStep::page_with(int64_t id) {
  const int64_t place = id - first_id_;
  const bool known = place >= 0 && place < static_cast<int64_t>(index_of_id_.size());
  return known ? &pages_[at(index_of_id_[at(place)])] : nullptr;
}

void VirtualStep::publish(const std::vector<int64_t>& ids, const std::vector<double>& weights,
                          const std::vector<int8_t>& exits, Distance distance) {
  require(ids.size() == weights.size() && ids.size() == exits.size(),
          "what is published has columns of different lengths");
  for (size_t i = 0; i < ids.size(); ++i) {
    if (Page* each = page_with(ids[i]); each != nullptr) {
      each->weight = weights[i];
      each->exit = static_cast<Exit>(exits[i]);
    }
  }
  device_.distance = distance;
}

// For the policy that is asked; without one nobody takes them.
void VirtualStep::emit(EventKind kind, const Page* page, int64_t bytes, double seconds,
                       int64_t key) {
  if (pump_) {
    const int32_t reason = kind == EventKind::Packed ? 1 : 0;
    events_.push_back({static_cast<int32_t>(kind), reason, page != nullptr ? page->id : -1,
                       now_.tick, bytes, key, seconds});
  }
}

void VirtualStep::note_peak(int64_t bytes) {
  totals_.peak_bytes = std::max(totals_.peak_bytes, bytes);
}

void VirtualStep::log(LogKind kind, int64_t number, int64_t bytes, double begin_s, double end_s) {
  log_.push_back({static_cast<int64_t>(kind), number, now_.position(), bytes, dropped_bytes_,
                  away_bytes_ - dropped_bytes_, begin_s, end_s});
}

}  // namespace delta
