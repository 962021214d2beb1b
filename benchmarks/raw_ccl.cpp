// oneCCL's allreduce, under Intel MPI's mpirun; see raw_timing.h. Usage: raw_ccl seconds bytes...
#include <memory>
#include <oneapi/ccl.hpp>

#include "raw_timing.h"

// oneCCL's static library for CPUs calls Intel's tracing library through these pointers; null disables tracing.
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

std::unique_ptr<ccl::communicator> everyone;

ccl::communicator connect() {
  int rank;
  int size;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
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

void allreduce(float* data, std::size_t count) {
  ccl::allreduce(data, data, count, ccl::reduction::sum, *everyone).wait();
}

}  // namespace

int main(int argc, char** argv) {
  int provided;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  ccl::init();
  everyone = std::make_unique<ccl::communicator>(connect());
  time_allreduce(argc, argv, allreduce);
  everyone.reset();
  MPI_Finalize();
}
