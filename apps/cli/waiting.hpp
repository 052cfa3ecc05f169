#pragma once

namespace cf::apps {

/// Lets the threads of OpenMP spin for microseconds while they wait for each other, and sleep then, unless the
/// environment says how they wait. By default they spin for milliseconds: on a machine with other work a waiting thread
/// then takes the time that the one it waits for needs. OpenMP reads the environment when it is loaded, so the program
/// is executed anew, within the same process. Where that fails, nothing changes.
void let_waiting_threads_sleep();

}  // namespace cf::apps
