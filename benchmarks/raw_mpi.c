/* MPI's allreduce; see raw_timing.h. Usage: raw_mpi seconds bytes... */
#include "raw_timing.h"

static void allreduce(float *data, size_t count) {
  MPI_Allreduce(MPI_IN_PLACE, data, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  time_allreduce(argc, argv, allreduce);
  MPI_Finalize();
  return 0;
}
