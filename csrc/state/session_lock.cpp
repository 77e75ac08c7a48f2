#include "state/session_lock.h"

#include <utility>
#include <vector>

#include "state/values.h"
#include "util/gil.h"

namespace delta {

void Guard::lock() {
  mutex_.lock();
  thread_trash().locked = true;
  held_ = true;
}

bool Guard::lock_with_gil() {
  if (!holds_gil()) {
    lock();
  } else if (mutex_.try_lock_for(gil_patience())) {
    thread_trash().locked = true;
    held_ = true;
  }
  return held_;
}

void Guard::unlock() {
  auto& trash = thread_trash();
  trash.locked = false;
  held_ = false;
  if (trash.storages.empty() && trash.values.empty()) {
    mutex_.unlock();
    return;
  }
  std::vector<c10::Storage> storages;
  std::vector<c10::IValue> values;
  storages.swap(trash.storages);
  values.swap(trash.values);
  mutex_.unlock();
}

}  // namespace delta
