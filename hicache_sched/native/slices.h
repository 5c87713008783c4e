// How the kernel schedules a thread. Nothing here knows Python.
#pragma once

namespace hicache {

// Ask for the shortest time slices for the calling thread, for one that sleeps mostly and has little to do: where all
// cores are busy it then runs soon after it is woken, rather than when the slice of another thread is over, 3 ms. Not
// for a thread that has the GIL now and then, whose slice would end with the GIL in hand; and not for one that has much
// to do, which would take the core of whoever wakes it. A hint: Linux heeds it from 6.12 on.
void ask_for_short_slices();

}  // namespace hicache
