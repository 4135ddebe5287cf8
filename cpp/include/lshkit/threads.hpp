#pragma once

namespace lshkit {

// Threads of the work that this thread starts without a number of its own; returns the one before.
int set_max_threads(int threads);

}  // namespace lshkit
