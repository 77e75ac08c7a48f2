// Memory of the CPU pool's large blocks.
//
// Note: why not malloc
//  1. glibc gives memory back to the system whenever the top of its heap is free and takes it again
//     at the next allocation. A step that evicts frees in other places than an ordinary one and
//     paid a fifth of its time for the page faults.
//  2. What is free inside glibc's heap stays resident, so a budget was kept by its own account
//     while the process grew past it.
//
// Here free memory stays resident as long as all that is resident exceeds the limit, or without one
// the most that was in use, by no more than a quarter (room for what fragments; a half, where only
// parts of huge pages are free), and goes back to the system beyond that. Blocks come out of one
// reservation of address space; where that cannot be had, the pool uses malloc.
#pragma once

#include <cstddef>
#include <cstdint>

namespace delta {
namespace arena {

constexpr std::size_t kLeastBytes = 256 * 1024;  // smaller blocks are malloc's

void prepare();  // takes the address space; before any thread could fork in the middle of it
// A page-aligned block, or nullptr where there is no address space for it. Its content is
// undefined.
void* allocate(std::size_t bytes);
std::size_t release(void* block);  // returns what it took
bool owns(const void* block);
std::size_t rounded(std::size_t bytes);  // what a block of so many bytes takes

void set_limit(int64_t bytes);  // of resident memory, in use and free; 0: none
int64_t idle_bytes();           // resident and free
int64_t resident_bytes();       // in use and free

}  // namespace arena
}  // namespace delta
