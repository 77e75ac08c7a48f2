// The random generators of Python and numpy, which an op written in Python may draw from: running
// it again must not move them.
#pragma once

#include <functional>
#include <memory>

namespace delta {

struct PythonRandom {
  std::function<std::shared_ptr<void>()> save;
  std::function<void(const std::shared_ptr<void>&)> restore;
};
void set_python_random(PythonRandom hooks);

// Puts them back when it dies, if that is wanted.
class PythonRandomGuard {
 public:
  explicit PythonRandomGuard(bool wanted);
  ~PythonRandomGuard();
  PythonRandomGuard(const PythonRandomGuard&) = delete;
  PythonRandomGuard& operator=(const PythonRandomGuard&) = delete;

 private:
  std::shared_ptr<void> saved_;
};

}  // namespace delta
