// Which page a tensor lies in, and what a write to it changes.
#pragma once

#include "observe/outside_memory.h"

namespace delta {

class TensorPages : public Part {
 public:
  TensorPages(SessionState& state, Sources& sources, OutsideMemory& outside)
      : Part(state), sources_(sources), outside_(outside) {}

  // The page that an op uses; makes a source of what is unknown, and notices writes that nobody
  // recorded. Under the lock.
  Page* page_of(const at::Tensor& t);
  // The page of what is about to be written to; null where no page can lie over that memory. Under
  // the lock.
  Page* page_to_write(const at::Tensor& t);
  // Something that is not taped is about to write to the page. Under the lock.
  void before_write(Page& page, const at::Tensor& t, ToClone& to_clone);

  // Without the lock, as all that follows. Something that we did not see has written to the tensor;
  // or is about to.
  void mark_written(const at::Tensor& t);
  void prepare_write(const at::Tensor& t);
  // The tensor is there: what no pool counts of it is charged now, not when an op first reads it.
  void take_in(const at::Tensor& t);
  // Python code is about to get hold of a storage's memory, or to write to it past the dispatcher.
  // `loan` names the array that it gets; kForGood: what it gets is not an array, and may be kept.
  void before_raw_access(const c10::Storage& storage, bool writes, int64_t loan);

 private:
  Page& new_source(const c10::Storage& storage);
  Page& page_for(const c10::Storage& storage);
  void move_page(Page& page, const c10::Storage& storage);
  void before_write_unseen(Page& page, ToClone& to_clone);

  Sources& sources_;
  OutsideMemory& outside_;
};

}  // namespace delta
