#include "observe/open_op.h"

#include <algorithm>
#include <utility>

namespace delta {

void OpenOp::clear() {
  for (auto* ticket : std::exchange(pending, {})) {
    if (ticket->state != Ticket::State::Pending) {
      continue;  // resolved, before something else raised
    }
    ticket->state = Ticket::State::Kept;
    at::Tensor saved = std::exchange(ticket->kept, at::Tensor(ticket->kept.tensor_data()));
    thread_trash().take(c10::IValue(std::move(saved)));
  }
  for (auto& w : written) {
    w.page->doubts.being_written = false;
  }
  written.clear();
  record.reset();
  inputs.clear();
  if (!input_set_.empty()) {
    input_set_.clear();
  }
  active = false;
  region = false;
  info = nullptr;
  log_index = -1;
  managed_input_bytes = 0;
}

bool OpenOp::reads(const Page& page) {
  constexpr size_t few = 16;
  if (inputs.size() <= few) {
    return std::any_of(inputs.begin(), inputs.end(),
                       [&](const auto& input) { return input.get() == &page; });
  }
  if (input_set_.empty()) {
    for (const auto& input : inputs) {
      input_set_.insert(input.get());
    }
  }
  return input_set_.count(&page) > 0;
}

}  // namespace delta
