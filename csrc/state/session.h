// The state of one runtime: pages, values, tickets, counters, limits. Its methods live in the file
// of their concern, which is named above each group of them.
//
// Note: locks
//  1. `mutex_` guards pages, values and records. It is held for microseconds; nothing that
//     allocates from the pool, runs an op, takes the GIL or frees foreign objects happens under it.
//  2. The rescue runs inside an allocation and takes `mutex_`. A thread that holds it already
//     (Guard marks the thread's trash) gets no rescue.
//  3. Foreign objects (storages, kept arguments: their death may take the GIL) that lose their last
//     owner under the lock wait in the thread's Trash and die after the unlock.
#pragma once

#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "observe/open_op.h"
#include "observe/random_draws.h"
#include "observe/ticket.h"
#include "rebuild/device_evidence.h"
#include "state/address_ranges.h"
#include "state/counters.h"
#include "state/options.h"
#include "state/page_index.h"
#include "state/plan.h"
#include "state/rows.h"
#include "state/values.h"
#include "tiers/host_memory.h"
#include "tiers/lanes.h"
#include "util/gil.h"
#include "util/spin_lock.h"

namespace delta {

// Ops behind a value, without gradients, since something that autograd saved. A longer recipe is
// not kept: a rollout or an evaluation would else hold the records of all it has done.
constexpr int32_t kMostDepth = 512;
constexpr size_t kMostLoggedOps = 1 << 20;
constexpr size_t kMostLoggedOpsWithoutSaves = 1 << 14;
constexpr int64_t kSavedInVain = 16;  // times as much as is still there: no backward will need it
constexpr size_t kMostEvidence = 1 << 17;
constexpr size_t kMostEvents = 1 << 16;  // that pile up before they are drained

// Larger storages (a data set mapped into memory) are not hashed; nothing is recomputed from them
// if others can write to them.
extern int64_t most_watched_bytes;
constexpr int64_t kCheapToWatchBytes = 64 * 1024;
// Of a larger one that others can write to so many times as much may be hashed as ops read of it;
// beyond that, all of it so many times in all.
constexpr int64_t kMostTimesRead = 16;
constexpr int64_t kMostLooksInVain = 8;

// Smaller sources that others can write to are copied when an op reads them, if they are so many
// times smaller than another input; else nothing is recomputed from them.
constexpr int64_t kMostCopiedBytes = 256 * 1024;
constexpr int64_t kWorthACopy = 8;

constexpr size_t kFewForeign = 256;  // pages that are looked through one by one

constexpr int64_t kForGood = -1;  // no loan: whoever got the memory may keep it

constexpr size_t kMostTraceRows = 1 << 20;  // of one step

// What is known of the ops of one signature: an operator on arguments of one geometry.
struct OpFacts {
  int64_t watermark_bytes = -1;  // the highest seen; -1: none yet
  double seconds = -1;           // the least seen; -1: not timed yet
};

struct Session;

enum class Phase : int32_t { Forward = 0, Backward = 1 };

// What an accelerator's allocator counts.
struct DeviceBytes {
  int64_t live = 0;
  int64_t peak = 0;  // ever, or since somebody reset it
};
DeviceBytes device_bytes(c10::Device device);

// Those that have saved tensors whose sources anybody may write to.
std::vector<c10::intrusive_ptr<Session>> watching_sessions();
bool several_watch();
void forget_locks();  // in a forked child: whoever held them does not exist there

using ToClone = std::vector<c10::intrusive_ptr<Value>>;

// A tier below the device: where copies lie, and the way there and back.
struct SwapTier {
  Tier kind = Tier::Host;
  std::shared_ptr<Store> store;
  std::unique_ptr<Lane> out;
  std::unique_ptr<Lane> in;
  std::deque<TransferPtr> flying_out;  // submitted, in order; reap() takes their ends
  std::deque<TransferPtr> flying_in;
};

std::string mismatch_text(const Page& page, const std::vector<c10::intrusive_ptr<OpRecord>>& ops);
std::string names_of(const std::vector<const OpInfo*>& ops);
std::string likely_causes();
uint64_t evidence_key(const Value& value, bool copied);
using RanOps = ska::flat_hash_set<const OpRecord*>;  // in one rebuild

struct Session : c10::intrusive_ptr_target {
  explicit Session(SessionOptions options);
  ~Session() override;

  struct Evidence {
    int32_t steps = 0;       // in which it came back as it went
    int64_t last_step = -1;  // of these
    int64_t due_step = 0;    // in which it is compared again
  };
  class Guard {
   public:
    explicit Guard(Session& s) : session_(s) { lock(); }
    Guard(Session& s, std::defer_lock_t) : session_(s) {}
    ~Guard() {
      if (held_) {
        unlock();
      }
    }
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;
    void lock();
    bool lock_with_gil();  // never lets the GIL go; false: somebody has had the lock for long
    void unlock();         // and lets the trash die

   private:
    Session& session_;
    bool held_ = false;
  };

  // --- state/session.cpp
  void enter();  // on this thread: callback in, rescue on
  void leave();  // on that thread, or when it has ended
  void rest();   // left for good, or until it is entered again
  void begin_step();
  void end_step();
  void set_budget(int64_t bytes);
  void forget_past();
  void watch_threads();  // from now on, until nothing is saved any more and the session is left
  void end_watch();
  void forget_log();
  void note_stream(Page& page) const;  // under the lock
  void emit(EventKind kind, const Page* page, int64_t bytes, double seconds, int64_t key = -1,
            int reason = 0);
  void charge_uncounted(Page& page, int64_t bytes);
  void uncharge_gone();
  Levels levels() const;
  int64_t step_peak_bytes() const;  // the most that was live in this step
  void note_first_use(Page& page, const c10::Storage& storage);
  int64_t live_bytes() const;
  int64_t limit_bytes() const;  // what is kept to: the budget, or what had to be passed already
  void await_device() const;    // so that the clock shows what an accelerator took

  // --- state/page_table.cpp
  Page* page_of(const at::Tensor& t);  // under the lock; makes a source of what is unknown
  Page* find_page(const c10::StorageImpl* storage);
  bool storage_alive(const Value& v) const;
  c10::Storage storage_there(const Value& v) const;  // holding this content; empty: nowhere
  bool content_unchanged(const Page& page) const;
  Page& new_source(const c10::Storage& storage);
  Page& page_for(const c10::Storage& storage);
  Page* page_to_write(const at::Tensor& t);
  bool was_moved(const Page& page, const c10::StorageImpl& storage) const;
  void move_page(Page& page, const c10::Storage& storage);
  void look(Page& page, const c10::StorageImpl& storage);
  void look_again(Page& page, const c10::StorageImpl& storage);
  void sweep();  // forgets pages whose storage is gone
  void sweep_if_due();
  // Position in this step's order of produced values; -1: no op of this step made it. Values of an
  // earlier step have keys of that step, which are those of other values now.
  int64_t key_of(const Value& v) const { return v.step == step_ ? v.key : -1; }

  // --- observe/open_op.cpp
  void begin_op(ThreadState& ts, OpInfo* info, c10::ArrayRef<const c10::IValue> inputs);
  void end_op(ThreadState& ts, c10::ArrayRef<const c10::IValue> outputs);
  void note_foreign_writes(const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs);
  void note_writes(const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs, ToClone& to_clone);
  void note_draws(OpenOp& open);
  c10::intrusive_ptr<Value> new_value(OpenOp& open, bool unknown, int64_t bytes, bool is_argument,
                                      int position, int index);
  void take_written(OpenOp& open, bool unknown);
  void take_returned(OpenOp& open, bool unknown, int position, int index, const at::Tensor& t);
  void resolve_pending(OpenOp& open);
  bool saves_clone(const OpenOp& open, const at::Tensor& saved) const;
  Page* take_saved_clone(OpenOp& open, const at::Tensor& saved);

  // --- observe/step_log.cpp
  LoggedOp new_row(const OpInfo& info);
  void log_inputs(LoggedOp& row, const OpRecord& record);
  void log_begin(OpenOp& open, c10::ArrayRef<const c10::IValue> inputs);
  bool may_have_backward() const;  // under the lock
  void note_stuck(const OpenOp& open, int64_t watermark_bytes);
  void note_alone();  // under the lock

  // --- observe/saved_tensors.cpp
  void pack(const at::Tensor& t, Ticket& ticket);
  at::Tensor unpack_resident(Ticket& ticket);
  at::Tensor view_if_resident(Ticket& ticket);
  at::Tensor unpack(Ticket& ticket);
  at::Tensor view_for(const Ticket& ticket, const c10::Storage& storage) const;
  void note_used(Page& page);  // under the lock
  void release(Ticket& ticket);
  void resolve(Ticket& ticket, Page* page, const at::Tensor& t);
  bool attach_plan(Page& page);  // whether a plan knows it
  void follow(const Plan& plan, Page& page);
  double default_weight(const Page& page) const;
  Exit default_exit(const Page& page) const;
  int64_t next_use_of(Page& page, int64_t now) const;  // ticks; -1: unknown
  void count_kept(const at::Tensor& t, Page* page, KeptReason reason);

  // --- observe/outside_memory.cpp
  void before_raw_access(const c10::Storage& storage, bool writes, int64_t loan);
  void take_back(const std::vector<int64_t>& loans);  // their arrays are gone
  void forget_content(Page& page);
  void find_owners(Page& page, const c10::DataPtr& data);
  bool is_foreign(const c10::DataPtr& data) const;
  void add_foreign(Page& page);
  void set_unguarded(Page& page, int64_t loan = kForGood);
  void end_loans();
  bool watches() const;
  bool can_watch(const Page& page) const;
  void note_look(Page& page, const at::Tensor& t);
  void forget_shared(Page& page);
  void watch(Value& value, const void* data, int64_t bytes) const;
  void share_with_others(Page& page, int64_t loan = kForGood, ToClone* to_clone = nullptr);
  void link_if_aliases(Page& page, Page& other);
  void take_newly_shared(ToClone& to_clone);
  bool nothing_is_saved_at_rest() const;
  void before_write_of_others(Page& page, ToClone& to_clone);
  void spoil_others(Page& page);
  template <class Act>
  void for_each_foreign_over(Page& page, const Act& act);
  template <class Act>
  void for_each_alias(Page& page, const Act& act);
  bool holds(const Value& value, const c10::StorageImpl& storage) const;
  void check_content(Page& page, const at::Tensor& t);

  // --- observe/writes.cpp
  void mark_written(const at::Tensor& t);
  void prepare_write(const at::Tensor& t);
  bool needs_clone(Page& page);
  void clone_sources(const ToClone& sources);  // without the lock
  c10::Storage storage_to_copy(const Value& value);
  void spoil(Page& page, const at::Tensor& t);
  void before_write(Page& page, const at::Tensor& t, ToClone& to_clone);
  void before_write_unseen(Page& page, ToClone& to_clone);
  void spoil_anchor(Page& page);

  // --- evict/victims.cpp
  int64_t make_room(int64_t bytes, bool inside_allocation);
  int64_t evict(int64_t bytes, int64_t before, bool inside_allocation,
                std::vector<TransferPtr>& coming);  // under the lock
  int64_t look_ahead(int64_t need_bytes);           // returns what is missing
  bool drop_page(Page& page);                       // under the lock
  void note_dropped(Page& page);                    // under the lock: its bytes go now
  bool anchor_recipe(Value& v);                     // under the lock
  bool is_certain(const OpRecord& op) const;
  bool can_be_leaf(const Value& v) const;  // under the lock
  void stress_boundary();
  void add_candidate(Page& page);
  void remove_candidate(Page& page);
  int64_t distance_of(Page& page) const;

  // --- evict/swap.cpp
  void open_tiers();
  void tend_lanes(int64_t need_bytes);  // at an op boundary
  void write_back_queued();             // under the lock
  bool reap();                          // under the lock: takes in what the lanes have finished
  int64_t returns() const;              // blocks that have come back to any tier
  bool is_refused(const Page& page) const;
  bool may_swap(const Page& page) const;
  bool can_write_back(Page& page) const;
  bool write_back(Page& page);  // under the lock; false: it cannot be
  bool copy_is_good(const Page& page) const;
  bool is_alone(const Page& page) const;
  bool free_clean(Page& page);  // under the lock; true: its device copy is gone
  void forget_copy(Page& page);
  bool is_timed(const Page& page) const;
  ReturnOrder return_order(Page& page) const;
  c10::Storage bring_back(Page& page);
  bool begin_swap_in(Page& page, bool prefetch);
  void finish_swap_in(Page& page);              // under the lock
  void fail_swap_in(Page& page, bool differs);  // under the lock
  Lane& lane_in_of(const Page& page) const;
  double seconds_in_for(int64_t bytes) const;  // from the nearest tier; 0: not known yet
  void end_transfer(Transfer& transfer);       // under the lock
  void order_after_arrival(Page& page, const c10::Storage& storage) const;  // under the lock
  void stop_lanes();

  // --- rebuild/replay.cpp
  c10::Storage rebuild(Page& page);                      // returns the storage, which pins it
  void rehome(Page& page, const c10::Storage& storage);  // under the lock
  bool audit(Page& page);

  // --- rebuild/evidence.cpp, under the lock
  // Its content is about to go. False: not before take_hashes() was here.
  bool take_evidence(Page& page, bool copied);
  bool is_as_it_went(Page& page, const c10::Storage& storage, bool copied,
                     std::shared_ptr<const Suspects> suspects = nullptr,
                     std::vector<uint64_t> proved = {});
  void note_same(Evidence& known);
  bool is_proven(const Value& value) const;  // each op that a rebuild may run was seen to repeat
  std::vector<uint64_t> proved_by(const Value& value, const RanOps& ran) const;
  void taint(const Value& source);
  void lose_trust(const std::vector<c10::intrusive_ptr<OpRecord>>& ops);

  // --- rebuild/device_evidence.cpp: of an accelerator; under the lock but for the last two
  bool take_device_evidence(Page& page);
  void begin_evictions();                    // hashes that were taken before are out of date
  bool awaits_hash(const Page& page) const;  // it would be gone, but for its hash
  bool take_hashes(Guard& guard);  // lets go of the lock meanwhile; false: there were none to take
  void forget_hash(int32_t& row);
  std::shared_ptr<const Suspects> suspects_of(
      const std::vector<c10::intrusive_ptr<OpRecord>>& ops) const;
  void compare_later(Page& page, const c10::Storage& storage, bool copied,
                     std::shared_ptr<const Suspects> suspects, std::vector<uint64_t> proved);
  void hash_returned();  // before anybody gets it
  std::string take_verdict();
  std::string keep_verdict(const std::string& text);  // unless there is one; returns it
  void tell(const std::string& verdict) const;        // raises it, unless it is empty
  std::string judge();  // waits for the device, if anything was compared; what differed, if any did

  SessionOptions options_;
  SpinLock mutex_;
  ska::flat_hash_map<const c10::StorageImpl*, c10::intrusive_ptr<Page>> pages_;
  ska::flat_hash_map<int64_t, Page*> managed_;  // by id, while it has tickets
  std::vector<Page*> candidates_;               // managed and resident
  size_t sweep_at_ = 512;
  int64_t next_page_ = 0;
  int64_t live_tickets_ = 0;
  int64_t dropped_now_bytes_ = 0;
  int64_t managed_resident_bytes_ = 0;
  int64_t boundary_peak_bytes_ = 0;  // of an accelerator: the highest at a boundary of this step
  int64_t uncounted_bytes_ = 0;  // of sources that the pool does not own: older, or foreign memory

  int64_t tick_ = 0;
  int64_t step_ = 0;
  int64_t step_begin_tick_ = 0;
  int64_t next_key_ = 0;
  int64_t frontier_ = 0;      // tick at which the page that was unpacked last had been packed
  uint64_t fingerprint_ = 0;  // of the step so far
  uint64_t saves_ = 0;        // what was saved since it was made
  uint64_t sequence_ = 0;     // as fingerprint_, but of the ops' names alone
  int64_t packs_before_step_ = 0;
  int64_t unpacks_before_step_ = 0;
  uint64_t stranger_draws_before_ = stranger_draws().from_default();  // when the session began
  uint64_t walk_ = 0;
  bool has_anchors_ = false;   // of values that some page holds now
  uint32_t anchor_epoch_ = 1;  // moves on when an anchored source turns out to be overwritten
  uint64_t op_removals_ = 0;   // that the epoch knows of
  Phase phase_ = Phase::Forward;
  bool graph_gone_ =
      false;               // a backward of this step let its graph go: that step is over behind it
  int32_t backwards_ = 0;  // of this step, that kept theirs
  std::vector<int64_t> held_;  // pages saved in a logged step while somebody held them, by id
  bool hopeless_ = false;      // in this step even a rebuild from scratch had to pass the budget
  int64_t cloned_bytes_ = 0;   // of sources that were copied in this step before they were written

  std::vector<OpFacts> op_facts_;
  ska::flat_hash_map<uint64_t, size_t> facts_of_;  // index into op_facts_ by signature
  // Outputs of uncertain ops, by trust_key(): made again with the same bits, or ever with others.
  std::unordered_set<uint64_t> trusted_;
  std::unordered_set<uint64_t> distrusted_;
  bool mismatched_ = false;  // something that was recomputed came out different
  std::unordered_map<uint64_t, Evidence> evidence_;
  std::mt19937_64 evidence_random_;
  std::unique_ptr<DeviceEvidence> device_evidence_;       // of an accelerator
  std::vector<c10::intrusive_ptr<Page>> charged_lately_;  // see uncharge_gone
  int64_t uncharge_tick_ = 0;
  int64_t uncounted_peak_bytes_ = 0;  // of the step, until something was no longer charged
  // Pages of memory that is not the allocator's own, and those of its own that such memory lies
  // over: no others can have memory in common.
  std::vector<c10::intrusive_ptr<Page>> foreign_;
  PageIndex page_index_;
  AddressRanges foreign_ranges_;  // of those, and perhaps of some that are gone
  ska::flat_hash_map<int64_t, c10::intrusive_ptr<Page>> lent_;  // to arrays that are alive
  std::vector<c10::intrusive_ptr<Page>>
      returned_;  // one for each array that is gone; see end_loans
  ToClone
      newly_shared_;  // sources to be copied before anybody writes to them; see share_with_others
  c10::DeleterFnPtr own_deleter_ = nullptr;   // of what its allocator allocates
  std::unordered_set<uint64_t> unswappable_;  // keys of values whose copies came back different
  std::string verdict_;  // of a step that is over, where nobody could be told yet
  std::atomic<bool> has_verdict_{false};
  std::unordered_map<uint64_t, bool> shortcut_holds_;  // by op and numbers; see shortcuts.h
  std::vector<Event> events_;

  bool logging_ = false;
  std::vector<LoggedOp> log_ops_;
  std::vector<int64_t> log_inputs_;
  std::vector<LoggedValue> log_outputs_;
  ska::flat_hash_map<uint64_t, const OpInfo*> log_names_;

  std::vector<std::shared_ptr<const Plan>> plans_;  // of the steps that are known, latest first
  const Plan* plan_ = nullptr;                      // that this step follows
  Distance distance_ = Distance::None;
  DefaultWeight default_weight_ = DefaultWeight::SecondsPerByte;
  std::function<void(int64_t)> pump_;      // Python decides; called at op boundaries only
  std::function<void(int64_t)> drain_;     // takes the events away
  std::function<void(int64_t)> boundary_;  // backward is over and something else begins
  bool taping_ = true;                     // false while an optimizer steps
  int64_t last_pump_tick_ = -1000000;
  int64_t pump_interval_ticks_ = 64;
  bool pumping_ = false;

  std::vector<SwapTier> tiers_;   // nearest first; empty: the policy swaps nothing
  std::deque<int64_t> to_write_;  // pages packed and not written back yet, by id
  std::set<std::pair<ReturnOrder, int64_t>> swapped_;  // (order of return, page id)
  int64_t swapped_now_bytes_ = 0;                      // of these pages
  int64_t swapping_in_bytes_ = 0;
  double early_write_back_ = 0.5;  // share of the budget from which unplanned pages are written
  bool tracing_ = false;
  std::vector<TraceRow> trace_;

  Counters counters_;
  std::mt19937_64 random_;
  std::atomic<bool> entered_ = false;
  std::atomic<bool> resting_ = false;  // nobody is in the runtime: not even under delta.disable()
};

}  // namespace delta
