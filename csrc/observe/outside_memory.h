// Memory that others than ops can write to: foreign memory, and what was lent to arrays. It is
// watched by hashes, or nothing is recomputed from it.
#pragma once

#include <vector>

#include "state/sources.h"

namespace delta {

// Larger storages (a data set mapped into memory) are not hashed; nothing is recomputed from them
// if others can write to them.
extern int64_t most_watched_bytes;

constexpr int64_t kForGood = -1;  // no loan: whoever got the memory may keep it

// Under the session's lock, but for take_back.
class OutsideMemory : public Part {
 public:
  OutsideMemory(SessionState& state, Sources& sources);

  bool is_foreign(const c10::DataPtr& data) const;  // whether it is not the allocator's own
  // Of a storage that is new here, or lies elsewhere now: do others hold its memory, or storages
  // over the same memory?
  void find_owners(Page& page, const c10::DataPtr& data);
  void set_unguarded(Page& page, int64_t loan = kForGood);
  // From here on the content of the page is looked at whenever an op reads it. What dropped pages
  // need of it is to be copied now. Where nobody can look it is unknown; who found that it is
  // shared takes what is to be copied before the lock is let go.
  void share_with_others(Page& page, int64_t loan = kForGood, ToClone* to_clone = nullptr);
  void take_newly_shared(ToClone& to_clone);
  void spoil_newly_shared();                          // it was written to already
  void take_back(const std::vector<int64_t>& loans);  // the arrays of these loans are gone
  // A page whose last array is gone is guarded again, as soon as no recipe starts from what it
  // holds.
  void end_loans();
  bool nothing_is_saved_at_rest() const;

  // Whether contents are compared here: what is never recomputed needs no evidence, and the bytes
  // of an accelerator cannot be looked at without waiting for it.
  bool watches() const;
  bool can_watch(const Page& page) const;  // not on an accelerator, and not too much
  void watch(Value& value, const void* data, int64_t bytes) const;
  // An op is about to read the page: is what lies there what we think? On an accelerator nobody can
  // look.
  void check_content(Page& page, const at::Tensor& t);

  // Others over the same memory are about to be written to through this page; or were, and what lay
  // there is gone.
  void before_write_of_others(Page& page, ToClone& to_clone);
  void spoil_others(Page& page);

 private:
  void link_if_aliases(Page& page, Page& other);
  void forget_shared(Page& page);
  void note_look(Page& page, const at::Tensor& t);
  template <class Act>
  void for_each_alias(Page& page, const Act& act);

  Sources& sources_;
  ska::flat_hash_map<int64_t, c10::intrusive_ptr<Page>> lent_;  // to arrays that are alive
  std::vector<c10::intrusive_ptr<Page>> returned_;              // one for each array that is gone
  ToClone newly_shared_;                     // to be copied before anybody writes to them
  c10::DeleterFnPtr own_deleter_ = nullptr;  // of what an accelerator's allocator allocates
};

}  // namespace delta
