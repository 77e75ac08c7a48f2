// A local search over which saved values are there in which slot of backward, for the joint
// planner.
//
// The twin of delta_runtime/planners/presence_search.py, which says what it means. It does the same
// arithmetic in the same order, so that both give equal plans. Knows plain numbers alone, and is
// called without the GIL.
#pragma once

#include <cstdint>
#include <vector>

#include "planners/reruns.h"
#include "planners/saved_step.h"

namespace delta::planners {

// Columns as of `Slots`.
struct Slots {
  std::vector<double> bytes;    // of each value; they are in the order in which they are made
  std::vector<double> seconds;  // of rebuilding it
  Lists parents;                // what each is rebuilt from
  std::vector<int64_t> first;   // slot from which it may be away
  std::vector<int64_t> end;     // slot from which it is let go of
  std::vector<int64_t> leaves;  // limit of forward from which on it counts; -1: it stays in forward
  std::vector<uint8_t> fixed;   // whether it is not moved
  Lists asked;                  // what is asked for in each slot, in order
  Lists pinned;                 // what has to be there in it
  std::vector<double> room;     // bytes for all that may be away, in the op of each slot
  std::vector<double> spare;    // that a rebuild there may hold for a moment
  std::vector<double> rest_room;  // as `room`, in the ops until the next slot
  std::vector<double> forward_room;

  int64_t n_values() const { return static_cast<int64_t>(bytes.size()); }
  int64_t n_slots() const { return static_cast<int64_t>(room.size()); }
};

struct Found {
  double seconds;
  double excess;  // bytes too much, summed over slots
  double most;    // bytes too much where it is worst; below 0: what is left
  std::vector<uint8_t> there;
};

// Not for several threads at once.
class PresenceSearch {
 public:
  // `there`: of each value, one after the other, whether it is there in forward and in each of its
  // slots. Throws std::invalid_argument where columns do not fit each other.
  PresenceSearch(Slots slots, RerunColumns reruns, std::vector<uint8_t> there);

  // Goes on for at least so many units of work. Returns whether it is through: so many turns in a
  // row found nothing better.
  bool go_on(int64_t most_work, int64_t most_in_vain);

  int64_t work() const { return work_; }  // done so far
  Found best();

 private:
  enum class As { There, Away, Back };  // how a value is looked at in a slot
  struct Made {
    double seconds;
    double held;  // for a moment
  };
  struct Slot {
    Made made{0.0, 0.0};
    double sum = 0.0;              // bytes there, in the op of the slot
    double rest_sum = 0.0;         // in the ops until the next
    double price = 0.0;            // seconds for a byte too much in its op
    double rest_price = 0.0;       // and in the ops until the next
    std::vector<int64_t> backs;    // values that are back from here on, in order
    std::vector<int64_t> touched;  // values that its rebuilds make or read, in order
  };

  bool is_there(int64_t value, int64_t slot) const;
  bool is_found(int64_t value, int64_t slot) const;
  bool is_pinned(int64_t value, int64_t slot) const;
  bool is_touched(int64_t value, int64_t slot) const;
  void bring(int64_t value, int64_t slot, Made& into);
  Made make(int64_t slot, int64_t value, As as);
  Made make_alone(int64_t slot, int64_t value);
  bool may_pay(int64_t slot, int64_t value) const;
  double over(int64_t slot, double sum, double held) const;
  double rest_over(int64_t slot, double sum) const;
  double forward_over(size_t limit) const;
  double forward_penalty(int64_t value, double bytes) const;
  void add_over(int64_t slot, double sign);
  void add_rest_over(int64_t slot, double sign);
  void add_forward_over(size_t limit, double sign);
  void find_costs(int64_t value);
  bool improve(int64_t value);
  void put(int64_t value, const std::vector<uint8_t>& path);
  void look_again(int64_t slot);
  void count();
  double objective() const { return seconds_ + penalty_; }
  void set_prices(double price);
  void raise_prices(double step);
  bool sweep();
  void force(int64_t value);
  void put_stretch();
  void keep_if_better();
  void go_back();
  void begin();
  void begin_anew(double step);
  void begin_first_turn();
  void begin_turn();
  void go_on_with_turn();
  uint64_t random(uint64_t most);

  Slots slots_;
  Reruns reruns_;
  std::vector<int64_t> offsets_;
  std::vector<uint8_t> there_;
  std::vector<uint8_t> pinned_;  // as `there_`
  std::vector<Slot> slot_;
  std::vector<double> forward_sum_;
  std::vector<int64_t> movable_;
  double seconds_ = 0.0;
  double excess_ = 0.0;
  double penalty_ = 0.0;  // each byte of it at its price
  std::vector<double> forward_price_;
  double highest_price_ = 0.0;
  bool all_rise_ = true;  // in this turn: also prices where nothing is too much
  double unit_ = 0.0;
  double step_ = 0.0;
  std::vector<uint8_t> best_there_;
  double best_seconds_ = 0.0;
  double best_excess_ = 0.0;
  int64_t work_ = 0;
  uint64_t state_ = 1;
  int64_t in_vain_ = 0;
  bool begun_ = false;
  bool in_turn_ = false;
  int64_t forced_ = -1;  // the value that stays as it is in this sweep
  // Of the call that goes on:
  std::vector<int64_t> chain_;
  std::vector<int64_t> stack_;
  std::vector<int64_t> seen_;  // the mark of the rebuild that each was seen in last
  int64_t mark_ = 0;
  std::vector<int64_t> made_in_;  // the mark of the slot that each was made in last
  int64_t slot_mark_ = 0;
  int64_t who_ = -1;
  As as_ = As::There;
  bool early_ = false;  // whether what is made now is made before it is asked for
  std::vector<int64_t>* record_ = nullptr;
  std::vector<double> costs_;  // four for each slot: before and in it away or there
  std::vector<double> cost_;
  std::vector<uint8_t> from_;
  std::vector<uint8_t> path_;
};

}  // namespace delta::planners
