// Every page that a session knows: found by its storage, by its number, and by the memory it lies
// over.
#pragma once

#include <c10/util/flat_hash_map.h>

#include <utility>
#include <vector>

#include "state/account.h"
#include "state/address_ranges.h"
#include "state/counters.h"
#include "state/event_log.h"
#include "state/page_index.h"
#include "state/session_lock.h"
#include "state/values.h"

namespace delta {

class PageTable;

// The page of a storage. One that is new, and that nobody gave a content, goes out of the table
// again: whoever was to do so threw.
class AddedPage {
 public:
  AddedPage(PageTable& table, Page& page, bool is_new)
      : table_(table), page_(page), is_new_(is_new) {}
  ~AddedPage();
  AddedPage(const AddedPage&) = delete;
  AddedPage& operator=(const AddedPage&) = delete;

  Page& operator*() const { return page_; }
  bool is_new() const { return is_new_; }

 private:
  PageTable& table_;
  Page& page_;
  bool is_new_;
};

// All of it under the session's lock, but for forget_past.
class PageTable {
 public:
  PageTable(SessionOptions& options, SessionLock& lock, const Progress& now, Account& account)
      : options_(options), lock_(lock), now_(now), account_(account) {}

  size_t size() const { return pages_.size(); }
  Page* find(const c10::StorageImpl* storage) const;
  AddedPage find_or_add(const c10::Storage& storage);
  void erase(const Page& page);                          // that holds no bytes
  void forget(const Page& page);                         // that was just added
  void rehome(Page& page, const c10::Storage& storage);  // the page lives there from here on

  // Looks how many bytes the page has now, and where.
  void look(Page& page, const c10::StorageImpl& storage);
  void look_again(Page& page, const c10::StorageImpl& storage);  // of one that may be managed

  // Pages with tickets, by number.
  const ska::flat_hash_map<int64_t, Page*>& managed() const { return managed_; }
  Page* managed(int64_t id) const;
  void manage(Page& page);
  void unmanage(Page& page);

  // Those of them that are resident.
  const std::vector<Page*>& candidates() const { return candidates_; }
  int64_t managed_resident_bytes() const { return managed_resident_bytes_; }
  void add_candidate(Page& page);
  void remove_candidate(Page& page);

  // Pages of memory that is not the allocator's own, and those of its own that such memory lies
  // over: no others can have memory in common.
  void add_foreign(Page& page);
  bool may_be_foreign(const void* data, int64_t bytes) const {
    return foreign_ranges_.meets(data, bytes);
  }
  template <class Act>
  void for_each_over(const Page& page, const Act& act);
  template <class Act>
  void for_each_foreign_over(const Page& page, const Act& act);

  bool has_anchors() const { return has_anchors_; }  // of values that some page holds now
  void note_anchor() { has_anchors_ = true; }

  void sweep_if_due();
  // Between steps: what no ticket needs is a source from here on, so that a loss that is kept does
  // not keep the records of its whole step, and with them the anchors of the weights.
  void forget_past();

 private:
  static constexpr size_t kFewForeign = 256;  // pages that are looked through one by one

  void sweep();  // forgets pages whose storage is gone
  void sweep_foreign();
  void sweep_anchors();

  SessionOptions& options_;
  SessionLock& lock_;
  const Progress& now_;
  Account& account_;
  ska::flat_hash_map<const c10::StorageImpl*, c10::intrusive_ptr<Page>> pages_;
  ska::flat_hash_map<int64_t, Page*> managed_;
  std::vector<Page*> candidates_;
  std::vector<c10::intrusive_ptr<Page>> foreign_;
  AddressRanges foreign_ranges_;  // of those, and perhaps of some that are gone
  PageIndex index_;
  size_t sweep_at_ = 512;
  int64_t next_page_ = 0;
  int64_t managed_resident_bytes_ = 0;
  bool has_anchors_ = false;
};

// Calls `act` with each page over the memory of this one. `act` may add to the table.
template <class Act>
void PageTable::for_each_over(const Page& page, const Act& act) {
  index_.for_each_over(pages_, page.data, page.bytes, act);
}

// Calls `act` with each foreign page over the memory of this one. Few are looked through; many are
// found among all pages, which are in order then.
template <class Act>
void PageTable::for_each_foreign_over(const Page& page, const Act& act) {
  if (foreign_.size() > kFewForeign) {
    for_each_over(page, [&](Page& other) {
      if (other.outside.listed) {
        act(other);
      }
    });
    return;
  }
  for (size_t i = 0, n = foreign_.size(); i < n; ++i) {  // `act` may add to them
    if (foreign_[i]->lies_over(page.data, page.bytes)) {
      act(*foreign_[i]);
    }
  }
}

}  // namespace delta
