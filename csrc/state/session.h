// The state of one runtime: pages, values, tickets, counters, limits. Its methods live in the file
// of their concern: session.cpp, recorder.cpp, saved_tensors.cpp, victims.cpp, replay.cpp,
// swap.cpp.
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

#include "observe/random_draws.h"
#include "rebuild/device_evidence.h"
#include "state/address_ranges.h"
#include "state/counters.h"
#include "state/page_index.h"
#include "state/plan.h"
#include "state/values.h"
#include "tiers/host_memory.h"
#include "tiers/lanes.h"
#include "util/gil.h"

namespace delta {

enum class EventKind : int32_t {
  Packed = 0,
  Used = 1,
  Dropped = 2,
  Rebuilt = 3,
  Released = 4,
  Edge = 5,
  Inadmissible = 6,
  SwappedOut = 7,
  SwappedIn = 8,
  Step = 9,
  Rescue = 10,
  Shortfall = 11,
  Replayed = 12,
  Alone = 13,
};

struct Event {
  int32_t kind;
  int32_t reason;
  int64_t page;
  int64_t tick;
  int64_t bytes;
  int64_t key;
  double seconds;
};
static_assert(sizeof(Event) == 48, "the Python side reads events as 48-byte rows");

enum class Distance : int32_t { None = 0, Staleness = 1, NextUse = 2 };
// Weight of a page that no policy has seen yet.
enum class DefaultWeight : int32_t { SecondsPerByte = 0, PerByte = 1, One = 2 };
enum class Stress : int32_t { None = 0, DropAll = 1, Random = 2, SwapAll = 3, RandomMix = 4 };
enum class Verify : int32_t { Off = 0, First = 1, Always = 2 };
enum class Phase : int32_t { Forward = 0, Backward = 1 };

struct SessionOptions {
  c10::Device device{c10::kCPU};
  int64_t budget_bytes = 0;  // 0: none
  int64_t min_bytes = 4096;
  Verify verify = Verify::First;
  Stress stress = Stress::None;
  uint64_t seed = 0;
  bool drop = true;             // pages may be dropped
  bool swap = false;            // pages may be swapped
  int64_t host_bytes = 0;       // most host memory to swap to; 0: no such tier
  double link_bytes_per_s = 0;  // throttle of each direction; 0: none
  int spill_file = -1;          // descriptor of the file to swap to, behind host memory; -1: none.
                                // It stays the caller's: the session makes one of its own
  int64_t spill_bytes = 0;      // most of it
  bool spill_direct = false;    // it is opened with O_DIRECT
  HostMemory::Pinning pinning;  // of host memory, below an accelerator

  bool evicts() const { return drop || swap; }
};

// One op of the step graph that is being logged.
struct LoggedOp {
  uint64_t fingerprint;  // of the forward up to and with this op; 0 in backward
  uint64_t name_hash;
  int64_t tick;
  int64_t live_bytes;  // at its begin, after evictions
  int64_t away_bytes;  // managed bytes that were dropped or swapped out then
  int64_t watermark_bytes;
  int64_t input_bytes;  // of its managed inputs
  double seconds;
  int64_t phase;
  int32_t first_input;
  int32_t n_inputs;
  int32_t first_output;
  int32_t n_outputs;
};
static_assert(sizeof(LoggedOp) == 88, "the Python side reads logged ops as 88-byte rows");

struct LoggedValue {
  int64_t key;
  int64_t bytes;
  int64_t repeats;  // 0: a workspace, say; it cannot be made again
};
static_assert(sizeof(LoggedValue) == 24, "the Python side reads logged values as 24-byte rows");

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

enum class TraceKind : int64_t { Op = 0, Rebuild = 1, CopyOut = 2, CopyIn = 3 };

// What took time, for the trace.
struct TraceRow {
  int64_t kind;
  int64_t name;           // of an op: hash of its name; else key of the value
  int64_t bytes;          // of a copy; of an op: live at its end
  int64_t dropped_bytes;  // at the end of an op
  int64_t swapped_bytes;  // of pages whose only copy is in a tier below, then
  double begin_s;         // by the steady clock
  double end_s;
};
static_assert(sizeof(TraceRow) == 56, "the Python side reads the trace as 56-byte rows");

// What is known of the ops of one signature: an operator on arguments of one geometry.
struct OpFacts {
  int64_t watermark_bytes = -1;  // the highest seen; -1: none yet
  double seconds = -1;           // the least seen; -1: not timed yet
};

struct Session;

struct Ticket {
  enum class State : uint8_t { Managed, Kept, Pending };

  c10::intrusive_ptr<Session> session;
  c10::intrusive_ptr<Page> page;
  ViewSpec view;
  at::Tensor kept;
  c10::weak_intrusive_ptr<at::TensorImpl, c10::UndefinedTensorImpl> original{
      c10::intrusive_ptr<at::TensorImpl, c10::UndefinedTensorImpl>()};
  uint64_t node = 0;        // that the next node of autograd would have got on this thread
  uint64_t thread = 0;      // as autograd counts them
  bool was_leaf = false;    // when it was saved
  bool made_by_op = false;  // it was saved inside the op that made it
  c10::VariableVersion version_counter;
  int64_t version = -1;
  State state = State::Kept;
  KeptReason reason = KeptReason::Unknown;

  ~Ticket();
};

// The atomic op that runs now on this thread.
struct OpenOp {
  struct Written {
    Page* page;
    c10::VariableVersion counter;
    bool has_counter;
    bool requires_grad;
    int16_t argument;
    int32_t index;
  };
  OpInfo* info = nullptr;
  c10::intrusive_ptr<OpRecord> record;                   // null while only observing
  c10::SmallVector<c10::intrusive_ptr<Page>, 6> inputs;  // parallel to record->inputs
  c10::SmallVector<Written, 2> written;
  std::vector<Ticket*> pending;
  int64_t live_bytes = 0;
  int64_t peak_bytes = 0;           // of an accelerator's allocator, ever
  int64_t managed_bytes = 0;        // of all pages that are resident at its begin
  int64_t managed_input_bytes = 0;  // of those that it reads; 0 while nothing is logged
  int64_t log_index = -1;
  int32_t depth = 0;  // of what it makes
  StrangerDraws::Mark strangers;
  size_t facts = 0;     // index into Session::op_facts_
  bool timed = false;   // its seconds count
  bool traced = false;  // they are shown
  std::chrono::steady_clock::time_point begin;
  int exceptions = 0;  // in flight at its begin, of one that returns nothing
  bool active = false;
  bool region = false;

  bool reads(const Page& page);  // or writes: whether the page is among its inputs
  void clear();

 private:
  ska::flat_hash_set<const Page*> input_set_;  // of long lists, filled when it is asked for
};

struct ThreadState {
  Session* session = nullptr;           // entered on this thread
  c10::intrusive_ptr<Session> visited;  // entered on another one; held while an op runs here
  int depth = 0;
  bool replaying = false;
  OpenOp open;
};
inline ThreadState& thread_state() { return per_thread<ThreadState>(); }

// For what is held over a handful of instructions, many times per op. Nobody waits for it while
// holding the GIL (gil.h).
class SpinLock {
 public:
  void lock() {
    if (held_.exchange(true, std::memory_order_acquire)) {
      wait_to_lock();
    }
  }
  bool try_lock_for(std::chrono::microseconds patience);
  void unlock() { held_.store(false, std::memory_order_release); }

 private:
  void wait_to_lock();

  std::atomic<bool> held_{false};
};

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

  // --- session.cpp: entering, steps, pages
  void enter();  // on this thread: callback in, rescue on
  void leave();  // on that thread, or when it has ended
  void rest();   // left for good, or until it is entered again
  void begin_step();
  void end_step();
  void set_budget(int64_t bytes);
  void mark_written(const at::Tensor& t);
  void prepare_write(const at::Tensor& t);
  void before_raw_access(const c10::Storage& storage, bool writes, int64_t loan);
  void take_back(const std::vector<int64_t>& loans);  // their arrays are gone
  void forget_past();
  void watch_threads();  // from now on, until nothing is saved any more and the session is left
  void end_watch();

  // --- recorder.cpp: one op
  void begin_op(ThreadState& ts, OpInfo* info, c10::ArrayRef<const c10::IValue> inputs);
  void end_op(ThreadState& ts, c10::ArrayRef<const c10::IValue> outputs);
  void note_foreign_writes(const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs);
  void note_writes(const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs, ToClone& to_clone);
  void note_draws(OpenOp& open);
  void forget_log();
  LoggedOp new_row(const OpInfo& info);
  void log_inputs(LoggedOp& row, const OpRecord& record);
  void log_begin(OpenOp& open, c10::ArrayRef<const c10::IValue> inputs);
  bool may_have_backward() const;  // under the lock
  void note_stuck(const OpenOp& open, int64_t watermark_bytes);
  void note_alone();  // under the lock
  c10::intrusive_ptr<Value> new_value(OpenOp& open, bool unknown, int64_t bytes, bool is_argument,
                                      int position, int index);
  void take_written(OpenOp& open, bool unknown);
  void take_returned(OpenOp& open, bool unknown, int position, int index, const at::Tensor& t);
  void resolve_pending(OpenOp& open);
  bool saves_clone(const OpenOp& open, const at::Tensor& saved) const;
  Page* take_saved_clone(OpenOp& open, const at::Tensor& saved);

  // --- saved_tensors.cpp
  void pack(const at::Tensor& t, Ticket& ticket);
  at::Tensor unpack_resident(Ticket& ticket);
  at::Tensor view_if_resident(Ticket& ticket);
  at::Tensor unpack(Ticket& ticket);
  at::Tensor view_for(const Ticket& ticket, const c10::Storage& storage) const;
  void note_used(Page& page);  // under the lock
  void release(Ticket& ticket);
  void resolve(Ticket& ticket, Page* page, const at::Tensor& t);

  // --- victims.cpp
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

  // --- swap.cpp
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
  void note_stream(Page& page) const;                                       // under the lock
  void stop_lanes();

  // --- evidence.cpp, under the lock
  struct Evidence {
    int32_t steps = 0;       // in which it came back as it went
    int64_t last_step = -1;  // of these
    int64_t due_step = 0;    // in which it is compared again
  };
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

  // --- device_evidence.cpp: of an accelerator; under the lock but for the last two
  class Guard;
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

  // --- replay.cpp
  c10::Storage rebuild(Page& page);                      // returns the storage, which pins it
  void rehome(Page& page, const c10::Storage& storage);  // under the lock
  bool audit(Page& page);

  // --- shared
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

  Page* page_of(const at::Tensor& t);  // under the lock; makes a source of what is unknown
  Page* find_page(const c10::StorageImpl* storage);
  bool needs_clone(Page& page);
  void clone_sources(const ToClone& sources);  // without the lock
  c10::Storage storage_to_copy(const Value& value);
  bool storage_alive(const Value& v) const;
  c10::Storage storage_there(const Value& v) const;  // holding this content; empty: nowhere
  bool content_unchanged(const Page& page) const;
  void forget_content(Page& page);
  void spoil(Page& page, const at::Tensor& t);
  void before_write(Page& page, const at::Tensor& t, ToClone& to_clone);
  void before_write_unseen(Page& page, ToClone& to_clone);
  Page& new_source(const c10::Storage& storage);
  Page& page_for(const c10::Storage& storage);
  Page* page_to_write(const at::Tensor& t);
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
  void spoil_anchor(Page& page);
  bool holds(const Value& value, const c10::StorageImpl& storage) const;
  void check_content(Page& page, const at::Tensor& t);
  bool was_moved(const Page& page, const c10::StorageImpl& storage) const;
  void move_page(Page& page, const c10::Storage& storage);
  void look(Page& page, const c10::StorageImpl& storage);
  void look_again(Page& page, const c10::StorageImpl& storage);
  void emit(EventKind kind, const Page* page, int64_t bytes, double seconds, int64_t key = -1,
            int reason = 0);
  void charge_uncounted(Page& page, int64_t bytes);
  void uncharge_gone();
  Levels levels() const;
  int64_t step_peak_bytes() const;  // the most that was live in this step
  void note_first_use(Page& page, const c10::Storage& storage);
  void sweep();  // forgets pages whose storage is gone
  void sweep_if_due();
  void add_candidate(Page& page);
  void remove_candidate(Page& page);
  bool attach_plan(Page& page);  // whether a plan knows it
  void follow(const Plan& plan, Page& page);
  double default_weight(const Page& page) const;
  Exit default_exit(const Page& page) const;
  // Position in this step's order of produced values; -1: no op of this step made it. Values of an
  // earlier step have keys of that step, which are those of other values now.
  int64_t key_of(const Value& v) const { return v.step == step_ ? v.key : -1; }
  int64_t next_use_of(Page& page, int64_t now) const;  // ticks; -1: unknown
  int64_t distance_of(Page& page) const;
  void count_kept(const at::Tensor& t, Page* page, KeptReason reason);
  int64_t live_bytes() const;
  int64_t limit_bytes() const;  // what is kept to: the budget, or what had to be passed already
  void await_device() const;    // so that the clock shows what an accelerator took

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
