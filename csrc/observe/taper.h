// What is kept of an op, so that it can be run again.
#pragma once

#include <ATen/core/ivalue.h>

#include "observe/op_info.h"
#include "state/session.h"

namespace delta {

// What surrounds the op that is about to run. `floats`: an input with dimensions has a floating
// dtype, so that the results of an op of PyTorch do not go by the default one. The thread count is
// read at the op's end: it may set it itself. Copies generators, which allocates.
c10::intrusive_ptr<OpRecord> new_record(OpInfo* info, c10::ArrayRef<const c10::IValue> inputs,
                                        c10::Device device, bool grads, bool floats);

// Takes the arguments of an op into its record: tensors as values and views of them, the rest as
// it is. Under the session's lock.
void take_arguments(Session& session, OpenOp& open, OpRecord& record, bool side_writes_hold,
                    c10::ArrayRef<const c10::IValue> inputs, ToClone& to_clone);

}  // namespace delta
