// A recorded step on a device that is only thought of: a capacity, lanes and a clock of plain
// numbers. What goes and comes is decided by the same code as in the runtime (walk/).
//
// Note: what is thought, and what is not
//   1. An op takes its recorded seconds, and holds its recorded watermark. Running again it takes
//      what the record expects of that (`StepGraph.rerun_seconds`).
//   2. Live bytes are those of the ordinary step, less what is away, and what a rerun makes on the
//      way. Sources that are anchored beyond their ordinary end are not counted.
//   3. What autograd asks for is held by the node that asked until another one asks.
//   4. The runtime's own work takes no time: recording, hashing, planning.
//   5. A rerun without room goes on beyond the budget. (The runtime drops what the rerun started
//      from first, and runs more.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "simulate/virtual_lane.h"
#include "util/rows.h"
#include "walk/lane_schedule.h"
#include "walk/plan.h"
#include "walk/row.h"
#include "walk/victims.h"
#include "walk/written_plan.h"

namespace delta {

// Lists of numbers, one behind the other.
struct ListsOf {
  std::vector<int64_t> offsets;
  std::vector<int64_t> items;

  struct Span {
    const int64_t* first;
    const int64_t* last;
    const int64_t* begin() const { return first; }
    const int64_t* end() const { return last; }
  };
  Span of(int64_t index) const {
    const auto i = static_cast<size_t>(index);
    return {items.data() + offsets[i], items.data() + offsets[i + 1]};
  }
};

// Columns of a StepGraph and of its recipes: core/step_graph.py and core/recipes.py say what they
// mean. Ticks count from the step's begin.
struct StepColumns {
  std::vector<int64_t> op_tick;
  std::vector<double> op_seconds;
  std::vector<double> again_seconds;
  std::vector<int64_t> ordinary_bytes;
  std::vector<int64_t> behind_bytes;  // live between the op and the next one
  std::vector<int64_t> watermark_bytes;
  std::vector<uint8_t> backward;
  ListsOf reads;  // values, by op
  std::vector<int64_t> value_op;
  std::vector<int64_t> value_bytes;
  std::vector<int64_t> saved;  // values; the columns that follow are in their order
  std::vector<int64_t> saved_at;
  std::vector<int64_t> alone_at;
  std::vector<int64_t> released_at;
  ListsOf uses;
  std::vector<uint8_t> possible;  // to be dropped
  ListsOf recipe_ops;
  ListsOf parents;
  int64_t ticks = 0;

  // Throws std::invalid_argument where columns do not fit each other.
  void check() const;
  int64_t n_ops() const { return static_cast<int64_t>(op_tick.size()); }
  int64_t n_saved() const { return static_cast<int64_t>(saved.size()); }
};

struct VirtualDevice {
  int64_t budget_bytes = 0;
  bool drops = true;
  double out_bytes_per_s = 0;  // 0: nothing is swapped
  double in_bytes_per_s = 0;
  int64_t host_bytes = 0;  // most that is swapped to
  int64_t min_bytes = 4096;
  bool is_cpu = false;  // its allocator rounds up as malloc does
  Distance distance = Distance::NextUse;
  DefaultWeight default_weight = DefaultWeight::SecondsPerByte;

  bool swaps() const { return out_bytes_per_s > 0 && in_bytes_per_s > 0 && host_bytes > 0; }
};

// What one step came to.
struct VirtualTotals {
  double seconds = 0;
  double rebuild_s = 0;
  double out_stall_s = 0;
  double in_stall_s = 0;
  int64_t peak_bytes = 0;
  int64_t drops = 0;
  int64_t dropped_bytes = 0;
  int64_t swap_outs = 0;
  int64_t swapped_out_bytes = 0;
  int64_t swap_ins = 0;
  int64_t rebuilds = 0;
  int64_t replayed_ops = 0;
  int64_t shortfalls = 0;
  int64_t shortfall_bytes = 0;  // the most at once
  int64_t plan_overdue = 0;
};

enum class LogKind : int64_t { Op = 0, Rebuild = 1, CopyOut = 2, CopyIn = 3, Drop = 4, Free = 5 };

// What happened, in the order in which it did.
struct LogRow {
  int64_t kind;
  int64_t number;  // of an op: its index; else of the value
  int64_t tick;    // of the step
  int64_t bytes;   // of an op: live when it begins
  int64_t dropped_bytes;
  int64_t swapped_bytes;
  double begin_s;
  double end_s;
};
static_assert(sizeof(LogRow) == 64, "the Python side reads the log as 64-byte rows");

class VirtualStep final : private Carrier, private Writer, private Mover {
 public:
  // `plan` may be null: then pages go by their default weights, when room is needed.
  VirtualStep(StepColumns step, VirtualDevice device, std::shared_ptr<const Plan> plan);

  VirtualTotals run();  // one step; the clock and the lanes go on from the one before

  // For a policy that decides without a plan: it is asked as the runtime asks it, takes the events
  // since then, and publishes its weights and ways out, of pages by their ids.
  void set_pump(std::function<void(int64_t)> pump) { pump_ = std::move(pump); }
  std::vector<Event> drain_events() { return std::exchange(events_, {}); }
  void publish(const std::vector<int64_t>& ids, const std::vector<double>& weights,
               const std::vector<int8_t>& exits, Distance distance);
  int64_t tick() const { return now_.tick; }
  int64_t queued_out_bytes() const { return out_.queued_bytes(clock_s_); }
  int64_t queued_in_bytes() const { return in_.queued_bytes(clock_s_); }

  const std::vector<LogRow>& rows() const { return log_; }  // of the last step

 private:
  struct Page : Row {
    int64_t index = -1;  // into the columns of saved values
    int64_t value = -1;
    Place place = Place::Lost;
    bool managed = false;
    bool let_go_away = false;  // it was not on the device when it was let go of
    int64_t candidate = -1;
    int32_t pins = 0;  // by a rerun, or a node that asked
    VirtualCopyPtr copy;
    VirtualCopyPtr arrival;
    int64_t refused_at = -1;
  };
  // Behind an op: a node that has ended lets go of what it asked for before the next one asks.
  enum class Ask : uint8_t { ReleaseBefore, Use, Release };
  struct Asked {
    int64_t tick;
    Ask what;
    int64_t index;
  };
  struct Rerun;

  // Carrier
  void reap() override;
  void offer(VictimQueue& victims) override;
  int64_t freed_bytes() override { return live_before_ - live_bytes(); }
  bool free_clean(Row& row) override;
  bool drop(Row& row) override;
  bool comes_free(const Row&) override { return false; }
  bool is_refused(const Row& row) override;
  bool write_back(Row& row) override;
  bool look() override { return false; }
  bool wait() override;
  // Writer
  Row* find(int64_t id) override;
  // Mover
  Row* row_of(int64_t value) override;
  Place place_of(const Row& row) override { return page(row).place; }
  bool has_copy(const Row& row) override { return page(row).copy != nullptr; }
  void enter(Row& row) override;
  void queue_write_back(Row& row) override { write_backs_.add(row); }
  void time_return(Row& row, int64_t tick) override;
  bool free_or_copy(Row& row) override;
  void note_overdue() override { ++totals_.plan_overdue; }
  void note_left() override {}

  static Page& page(Row& row) { return static_cast<Page&>(row); }
  static const Page& page(const Row& row) { return static_cast<const Page&>(row); }
  bool as_written() const { return plan_ != nullptr && plan_->as_written; }
  bool is_alone(const Page& page) const;
  static bool is_below(const Page& page) {
    return page.place == Place::Below || page.place == Place::OnTheWay;
  }
  int64_t live_bytes() const { return level_bytes_ - away_bytes_ + passing_bytes_; }
  int64_t next_use_of(Page& page) const;
  Page* page_with(int64_t id);  // null: it was of a step before, or is no page
  void emit(EventKind kind, const Page* page, int64_t bytes, double seconds, int64_t key);

  void begin_step();
  void boundary(int64_t op);
  void after_op();
  void before_op();
  void tend_lanes(int64_t need_bytes);
  int64_t look_ahead(int64_t need_bytes);
  void behind(int64_t op);
  void pack(int64_t index);
  void ask(Page& page);
  void release(Page& page);
  void forget_copy(Page& page);
  void give_back(VirtualCopy& copy);  // its block of host memory
  void begin_in(Page& page);
  void bring_back(Page& page);
  bool rebuild(Page& page, bool early);
  bool collect(Page& root, Rerun& rerun);
  int64_t need_again(int64_t op) const;
  bool run_again(Rerun& rerun, Page& root, bool early);
  void install(Page& page);
  void add_candidate(Page& page);
  void remove_candidate(Page& page);
  void wait_until(double then_s, double& stall_s);
  void note_peak(int64_t bytes);
  void log(LogKind kind, int64_t number, int64_t bytes, double begin_s, double end_s);

  StepColumns step_;
  VirtualDevice device_;
  std::shared_ptr<const Plan> plan_;
  ListsOf makes_;                            // values, by op
  std::vector<int64_t> index_of_;            // of each value among the saved ones; -1: it is none
  std::vector<std::vector<int64_t>> packs_;  // of each op, indices
  std::vector<std::vector<Asked>> asked_;    // behind each op

  Moment now_;
  double clock_s_ = 0;
  std::vector<Page> pages_;
  int64_t first_id_ = 0;              // of this step
  std::vector<int64_t> index_of_id_;  // of each page since then
  std::vector<Page*> candidates_;
  std::vector<Page*> in_use_;  // by the node that asked last
  int64_t level_bytes_ = 0;    // of the ordinary step
  int64_t away_bytes_ = 0;
  int64_t dropped_bytes_ = 0;  // of that
  int64_t passing_bytes_ = 0;
  int64_t live_before_ = 0;  // this walk
  int64_t host_used_bytes_ = 0;
  int64_t returned_ = 0;  // blocks of host memory that came back
  VirtualLane out_;
  VirtualLane in_;
  std::vector<VirtualCopyPtr> coming_;  // copies out that this walk needs
  Returns returns_;
  WriteBacks write_backs_;
  WrittenPlan schedule_;
  VirtualTotals totals_;
  std::vector<LogRow> log_;
  std::function<void(int64_t)> pump_;
  int64_t last_pump_tick_ = -1000000;
  std::vector<Event> events_;
};

}  // namespace delta
