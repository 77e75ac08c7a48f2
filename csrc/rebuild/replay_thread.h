// The thread of our own that runs an op again where the calling thread is not the one that it first
// ran on. See the Note in numeric_context.h.
#pragma once

#include <cstdint>
#include <functional>

namespace delta {

// A number of the calling thread that no other thread of this process has, or had.
uint32_t thread_serial();

void forget_replay_lock();  // in a forked child

// Runs `work` on our thread, which computes with `threads` threads, and waits for its end. What it
// throws is thrown here.
void run_on_replay_thread(int32_t threads, const std::function<void()>& work);

}  // namespace delta
