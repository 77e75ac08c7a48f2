// Swapping: pages whose bytes wait in host memory, or on disk.
//
// Note: clean pages
//  1. A page is clean when a finished copy of its present content lies in a tier below: its device
//     copy can be freed at once. Copies are made early, while the lane is idle or as the plan says,
//     but only of pages that nobody else holds: who holds a tensor may write to it, and not every
//     write can be seen.
//  2. A copy is of one content. It is good as long as the page's epoch (which moves on with every
//     new content that the recorder knows of) and version are those of its begin; both are looked
//     at when the device copy is freed, never only when the copy was made.
//  3. Copying begins at op boundaries, never inside pack: some ops save what they fill later.
//  4. A page in flight is held by its transfer; its bytes leave the account when the lane is done.
//  5. What came back keeps its copy, and stays clean, until its last ticket goes or the tier runs
//     short.
//  6. Nothing waits for a lane under the session's lock.
//  7. A copy goes to the nearest tier that has room, or will have as soon as it grows. One that
//  could not be written is none, and its
//     page is still there. One that cannot be read is replaced by running the recipe.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "rebuild/recipes.h"
#include "state/plan_table.h"
#include "tiers/host_memory.h"
#include "tiers/lanes.h"
#include "tiers/stream_spans.h"
#include "walk/lane_schedule.h"

namespace delta {

// A tier below the device: where copies lie, and the way there and back.
struct SwapTier {
  Tier kind = Tier::Host;
  std::shared_ptr<Store> store;
  std::unique_ptr<Lane> out;
  std::unique_ptr<Lane> in;
  std::deque<TransferPtr> flying_out;  // submitted, in order; reap() takes their ends
  std::deque<TransferPtr> flying_in;
};

// Under the session's lock, but for the constructor, `grow`, and `stop`.
class SwapTiers : public Part, private Writer {
 public:
  using PagePtrs = std::vector<c10::intrusive_ptr<Page>>;

  SwapTiers(SessionState& state, Evidence& evidence, Recipes& recipes, PlanTable& plans);
  ~SwapTiers() { stop(); }

  bool none() const { return tiers_.empty(); }  // the policy swaps nothing
  const std::vector<SwapTier>& all() const { return tiers_; }
  double seconds_in_for(int64_t bytes) const;  // from the nearest tier; 0: not known yet
  void begin_step();
  void end_step();  // counts what is known by now of the seconds of an accelerator's steps
  StreamSpans& spans() { return spans_; }
  std::vector<StepSeconds> take_device_seconds();  // of those that were counted, once
  void grow();                                     // takes more of the host's memory, by and by
  void note_host_wait(bool out, double seconds);   // somebody stood still for a lane
  void stop();  // ends the lanes' threads; what comes later is copied at once

  // Out.
  void queue_write_back(const Page& page);  // it was packed
  void write_back_queued();     // what the plan says; without one, while the lane is idle
  bool write_back(Page& page);  // false: it cannot be
  bool is_refused(const Page& page) const;  // no tier had room, and nothing has come free since
  bool wants_to_grow() const { return wants_to_grow_; }  // there will be room behind `grow`
  bool free_clean(Page& page);                           // true: its device copy is gone
  void forget_copy(Page& page);

  // In.
  PagePtrs wanted_back(int64_t room_bytes);  // by now
  PagePtrs some_swapped(const std::function<bool()>& chosen);
  void submit_in(Page& page, c10::Storage storage, const TransferPtr& transfer, bool prefetch);
  void finish_in(Page& page);
  void time_return(Page& page, int64_t tick);  // it is to come back then; -1: nobody says when
  void release(Page& page);  // its last ticket is gone while it is not on the device
  // What the stream that is current does next with the page comes after whatever brought it here.
  void order_after_arrival(Page& page, const c10::Storage& storage) const;
  c10::Storage storage_there(const Value& v) const;  // holding this content; empty: nowhere
  // Whether a tier below has a copy of it, so that its page may leave at any time. What comes back
  // is still to be compared with the value.
  bool has_copy_of(const Value& v) const;

  // Takes in what the lanes have finished: their ends go, so that no worker is ever the last owner
  // of a storage, and what has come back is resident. Returns whether there was any.
  bool reap();

 private:
  void open();
  void open_below_cpu();
  void open_below_accelerator();
  int64_t returns() const;  // blocks that have come back to any tier
  std::shared_ptr<Block> room_for(int64_t bytes, size_t& place, bool& grows);
  bool can_write_back(const Page& page) const;
  bool copy_is_good(const Page& page) const;
  void fail_out(Page& page, int error);
  void fail_in(Page& page, bool differs);
  void do_without_copy(Page& page, bool differs);
  Row* find(int64_t id) override;
  bool write_back(Row& row) override { return write_back(static_cast<Page&>(row)); }
  void trace(const Transfer& transfer, TraceKind kind);

  Evidence& evidence_;
  Recipes& recipes_;
  PlanTable& plans_;
  StreamSpans spans_{options_.device};
  std::vector<StepSeconds> device_seconds_;
  std::vector<SwapTier> tiers_;  // nearest first
  WriteBacks to_write_;
  Returns swapped_;
  std::atomic<bool> wants_to_grow_{false};
  struct HostWaits {
    int64_t step = 0;
    double out_s = 0;
    double in_s = 0;
  };
  std::deque<HostWaits> host_waits_;  // of steps whose seconds on the device are not known yet
};

}  // namespace delta
