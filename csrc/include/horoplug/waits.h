/* The C ABI of waits that the core does not see: outside of it, and in other engines. See
 * horoplug.h, whose rules apply. */
#ifndef HOROPLUG_WAITS_H_
#define HOROPLUG_WAITS_H_

#include "horoplug/horoplug.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Called like hp_expect_threads: threads that cannot continue before the calling thread does, such
 * as one that waits for its end. They count as blocked while the calling thread waits. The list
 * replaces the former one of this thread. */
HP_API hp_status hp_hold_threads(hp_engine* engine, const int64_t* ids, int32_t count);

/* Threads seem to wait for the operation outside of the core, for a future for example that another
 * thread completes. Called every 0.25 s or so as long as this is true; it counts for a second.
 *
 * The calling thread may be one of them, and then counts as blocked. Any other thread counts as
 * blocked only if it has slept without a break for half of hp_config.deadlock_time, in a lock or a
 * condition variable without a time limit, while the process computed nothing: a thread that
 * computes, sleeps for a time, or waits for a file, a socket or a process, is not blocked.
 *
 * A thread that calls hp_poll for a collective operation again and again, and does nothing else,
 * waits for the operation, too. */
HP_API hp_status hp_note_wait(hp_engine* engine, hp_handle handle, const int64_t* ids,
                              int32_t count);

/* The search for deadlocks of `engine` takes in the operations of `group`, another engine of this
 * process: ranks may wait for each other in different groups. All ranks of `group` are ranks of
 * `engine`: `ranks` are their numbers there, by their rank in `group`. `name` names the group in
 * error texts; it is the same on all ranks, and `engine` has no other group of that name. Ends with
 * either of the engines. */
HP_API hp_status hp_engine_attach(hp_engine* engine, hp_engine* group, const char* name,
                                  const int32_t* ranks, int32_t count);

#ifdef __cplusplus
}
#endif

#endif /* HOROPLUG_WAITS_H_ */
