// oneCCL's allreduce of float32 in place, timed as raw_mpi.c times MPI's, under Intel MPI's mpirun. Prints for each
// size "bytes microseconds". Usage: raw_ccl seconds bytes...
#include <mpi.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <oneapi/ccl.hpp>
#include <vector>

// oneCCL's archive for processors calls Intel's tracing library through these pointers; null means that nobody traces.
#define UNTRACED(name)                            \
  extern "C" void* const __itt_##name##_ptr__3_0; \
  void* const __itt_##name##_ptr__3_0 = nullptr;
UNTRACED(domain_create)
UNTRACED(event_create)
UNTRACED(event_end)
UNTRACED(event_start)
UNTRACED(metadata_add)
UNTRACED(string_handle_create)
UNTRACED(task_begin)
UNTRACED(task_end)
UNTRACED(thread_set_name)

namespace {

constexpr int kMostRounds = 20'000;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

ccl::communicator connect(int rank, int size) {
  ccl::shared_ptr_class<ccl::kvs> store;
  ccl::kvs::address_type address;
  if (rank == 0) {
    store = ccl::create_main_kvs();
    address = store->get_address();
  }
  MPI_Bcast(address.data(), static_cast<int>(address.size()), MPI_BYTE, 0, MPI_COMM_WORLD);
  if (rank != 0) store = ccl::create_kvs(address);
  return ccl::create_communicator(size, rank, store);
}

// Median over the calls of the slowest rank's time, in seconds.
double measure(const ccl::communicator& comm, std::size_t bytes, double seconds) {
  constexpr std::size_t kPage = std::size_t{2} << 20;
  const std::size_t room = (bytes + kPage - 1) / kPage * kPage;
  const std::unique_ptr<float, decltype(&std::free)> data(static_cast<float*>(std::aligned_alloc(kPage, room)),
                                                          &std::free);
  madvise(data.get(), room, MADV_HUGEPAGE);
  std::memset(data.get(), 0, room);
  const auto allreduce = [&] {
    ccl::allreduce(data.get(), data.get(), bytes / sizeof(float), ccl::reduction::sum, comm).wait();
  };
  const int group = bytes <= 4096 ? 20 : 1;
  for (int i = 0; i < 8; ++i) allreduce();
  double estimate = now();
  for (int i = 0; i < 5; ++i) allreduce();
  estimate = (now() - estimate) / 5 * group;
  int rounds = static_cast<int>(std::clamp(seconds / estimate, 5.0, kMostRounds * 1.0));
  MPI_Bcast(&rounds, 1, MPI_INT, 0, MPI_COMM_WORLD);
  MPI_Barrier(MPI_COMM_WORLD);
  std::vector<double> times(static_cast<std::size_t>(rounds));
  for (double& time : times) {
    const double start = now();
    for (int i = 0; i < group; ++i) allreduce();
    time = (now() - start) / group;
  }
  MPI_Allreduce(MPI_IN_PLACE, times.data(), rounds, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  std::nth_element(times.begin(), times.begin() + rounds / 2, times.end());
  return times[static_cast<std::size_t>(rounds / 2)];
}

}  // namespace

int main(int argc, char** argv) {
  int provided;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  int rank;
  int size;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  ccl::init();
  {
    const auto comm = connect(rank, size);
    for (int i = 2; i < argc; ++i) {
      const std::size_t bytes = std::strtoull(argv[i], nullptr, 10);
      const double time = measure(comm, bytes, std::atof(argv[1]));
      if (rank == 0) std::printf("%zu %.3f\n", bytes, time * 1e6);
    }
    std::fflush(stdout);
  }
  MPI_Finalize();
}
