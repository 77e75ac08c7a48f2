// Rescue on an accelerator: an op that dies of too little memory runs again, once there is room.
//
// Note: rescued ops
//  1. A kernel of ours stands in front of all others on the threads that a session follows: a
//     fallback for a dispatch key that nothing else uses (TESTING_ONLY_GenericMode), which is on in
//     the state of those threads. It calls what would have run without it. It costs each op half a
//     microsecond. It is there in a session's first steps; behind each step in which an op was
//     rescued, room had to be made, the allocator gave back what it kept, or values came that the
//     plan did not know, for some steps; and within a step from where room was made first.
//  2. An op whose memory gave out runs again on the arguments that it had. The random generators
//     that it may draw from are put back, and so is what it writes on the side (running
//     statistics), of which there is a copy. An op that writes to its arguments in place, and one
//     that is not PyTorch's own, is not run again: how far it came is not known.
//     Nor is one on a lazy clone, nor one whose runs somebody else counts: the saved-tensor hooks
//     of a checkpoint number what autograd saves, and this kernel stands above autograd.
//  3. Of a composite op the parts are rescued, each by itself: an allocation deep inside is tried
//     again where it is made. What a part could not be given, the whole is not tried again for.
//  4. The runtime's reruns, its copies back, and its copies of what is about to be overwritten are
//     rescued alike. What making room itself does is not, nor are hashes: to make room for them
//     would wait for what runs them.
//  5. What a __torch_dispatch__ calls is not rescued: PyTorch takes all keys above Python's away
//     there.
//  6. An allocator that keeps to a limit (pool/limited_allocator.h) makes room inside of the
//     allocation. Where one is there, what comes here is what it found no room for; host memory for
//     that may be pinned here, and not there.
#pragma once

namespace delta {

void rescue_ops(bool on);  // of this thread, and of backwards that it calls from here on

// For tests: what happens without it.
void set_op_rescue_enabled(bool enabled);

}  // namespace delta
