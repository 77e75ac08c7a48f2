// What is kept of an op, so that it can be run again.
#pragma once

#include "observe/open_op.h"
#include "observe/tensor_pages.h"

namespace delta {

// What surrounds the op that is about to run. `floats`: an input with dimensions has a floating
// dtype, so that the results of an op of PyTorch do not go by the default one. The thread count is
// read at the op's end: it may set it itself. Copies generators, which allocates.
c10::intrusive_ptr<OpRecord> new_record(OpInfo* info, c10::ArrayRef<const c10::IValue> inputs,
                                        c10::Device device, bool grads, bool floats);

// Takes the arguments of an op into its record: tensors as values and views of them, the rest as
// it is. Under the session's lock.
class Taper {
 public:
  Taper(c10::Device device, Sources& sources, OutsideMemory& outside, TensorPages& tensors,
        OpenOp& open, OpRecord& record, bool side_writes_hold, ToClone& to_clone)
      : device_(device),
        sources_(sources),
        outside_(outside),
        tensors_(tensors),
        open_(open),
        record_(record),
        side_writes_hold_(side_writes_hold),
        to_clone_(to_clone) {}

  void tape(c10::ArrayRef<const c10::IValue> inputs);

 private:
  bool tensor(size_t argument, int index, const at::Tensor& t);
  template <class T>
  c10::List<T> list(size_t argument, c10::ArrayRef<c10::IValue> elements);
  void list_of_lists(size_t argument, c10::ArrayRef<c10::IValue> lists);
  void keep(const at::Tensor& t);
  Write write_of(size_t argument, const at::Tensor& t, const Page& page) const;
  bool writes_through_two_storages() const;

  c10::Device device_;
  Sources& sources_;
  OutsideMemory& outside_;
  TensorPages& tensors_;
  OpenOp& open_;
  OpRecord& record_;
  bool side_writes_hold_;
  ToClone& to_clone_;
  // Sources that others can write to.
  c10::SmallVector<c10::intrusive_ptr<Value>, 2> small_of_others_;
  int64_t largest_ = 0;  // of the op's other inputs, bytes
  int32_t depth_ = 0;
};

}  // namespace delta
