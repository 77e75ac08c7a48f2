#include "util/sabotage.h"

namespace delta {
namespace {

std::atomic<bool> g_poison{false};

}  // namespace

const std::vector<const char*>& sabotage_names() {
  static const std::vector<const char*> names = {
#define DELTA_SABOTAGE_NAME(name) #name,
      DELTA_SABOTAGES(DELTA_SABOTAGE_NAME)
#undef DELTA_SABOTAGE_NAME
  };
  return names;
}

void set_sabotage(Sabotage which) { g_sabotage.store(which); }

bool poisons() { return g_poison.load(std::memory_order_relaxed); }
void set_poison(bool on) { g_poison.store(on); }

}  // namespace delta
