// What a plan says of a page, or where there is none, what is thought of it.
#pragma once

#include "walk/plan.h"
#include "walk/row.h"

namespace delta {

// Gives a page its weight, its way out, and the tick of its copy back, as the plan has them for
// this value. Under a plan that is carried out as written they are those of the interval that has
// begun last, and of use where room is short all the same; it comes back when the plan says so, as
// it leaves.
void follow(const Plan& plan, size_t value, const Moment& now, Row& row);

// The tick at which a page is asked for next, if the plan is of the step that goes on; -1: never.
int64_t next_use(const Plan& plan, size_t value, const Moment& now, Row& row);

// How far away the next use is, in ticks, as far as `which` wants to know; `next` as of `next_use`.
// Where no plan tells: backward asks in the order opposite to that in which forward saved, so from
// the page that was asked for last, those saved long before it are far, and those saved after it
// are done.
int64_t distance(Distance which, int64_t next, const Moment& now, const Row& row);

// How a page leaves while no policy has said so: the way that takes less time.
Exit default_exit(bool drops, bool swaps, double again_s, double copy_back_s);

double default_weight(DefaultWeight which, int64_t bytes, double again_s);

}  // namespace delta
