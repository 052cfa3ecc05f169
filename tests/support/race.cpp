// What ThreadSanitizer must and must not report: `race` without arguments has OpenMP's barrier between writing and
// reading, with an argument it has none.
#include <omp.h>

#include <cstddef>
#include <vector>

int main(int argc, char**) {
  std::vector<int> a(1000), b(1000);
  for (int round = 0; round < 50; ++round) {
#pragma omp parallel num_threads(3)
    {
      const int first = omp_get_thread_num(), threads = omp_get_num_threads();
      for (int i = first; i < 1000; i += threads) a[std::size_t(i)] = i + round;
      if (argc == 1) {
#pragma omp barrier
      }
      for (int i = first; i < 1000; i += threads) b[std::size_t(i)] = a[std::size_t(999 - i)];
    }
    if (argc == 1 && b[999] != round) return 1;
  }
}
