#include "util/python_random.h"

#include <utility>

namespace delta {
namespace {

PythonRandom& python_random() {
  static auto* hooks = new PythonRandom();  // never freed: they hold Python objects
  return *hooks;
}

}  // namespace

void set_python_random(PythonRandom hooks) { python_random() = std::move(hooks); }

PythonRandomGuard::PythonRandomGuard(bool wanted) {
  if (wanted && python_random().save) {
    saved_ = python_random().save();
  }
}

PythonRandomGuard::~PythonRandomGuard() {
  if (saved_) {
    python_random().restore(saved_);
  }
}

}  // namespace delta
