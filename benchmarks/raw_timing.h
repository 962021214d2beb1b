/* How raw_mpi.c and raw_ccl.cpp time an allreduce of float32 in place, as allreduce_bench times Horoplug's: for each
 * size one line "bytes microseconds", the median of the slowest rank's times. For C and C++; MPI is initialised.
 * Arguments: seconds bytes... */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { MAX_ROUNDS = 20000 };

static int compare_times(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static void time_allreduce(int argc, char **argv, void (*allreduce)(float *data, size_t count)) {
  int rank;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  const double seconds = atof(argv[1]);
  double *times = (double *)malloc(MAX_ROUNDS * sizeof *times);
  for (int i = 2; i < argc; ++i) {
    const size_t bytes = strtoull(argv[i], NULL, 10);
    const size_t count = bytes / sizeof(float);
    const size_t page = (size_t)2 << 20;
    const size_t size = (bytes + page - 1) / page * page;
    float *data = (float *)aligned_alloc(page, size);
    madvise(data, size, MADV_HUGEPAGE);
    memset(data, 0, size);
    const int group = bytes <= 4096 ? 20 : 1;
    for (int k = 0; k < 8; ++k) allreduce(data, count);
    double estimate = MPI_Wtime();
    for (int k = 0; k < 5; ++k) allreduce(data, count);
    estimate = (MPI_Wtime() - estimate) / 5 * group;
    int rounds = (int)(seconds / estimate);
    if (rounds < 5) rounds = 5;
    if (rounds > MAX_ROUNDS) rounds = MAX_ROUNDS;
    MPI_Bcast(&rounds, 1, MPI_INT, 0, MPI_COMM_WORLD);
    MPI_Barrier(MPI_COMM_WORLD);
    for (int k = 0; k < rounds; ++k) {
      const double start = MPI_Wtime();
      for (int j = 0; j < group; ++j) allreduce(data, count);
      times[k] = (MPI_Wtime() - start) / group;
    }
    MPI_Allreduce(MPI_IN_PLACE, times, rounds, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    qsort(times, (size_t)rounds, sizeof *times, compare_times);
    if (rank == 0) {
      printf("%zu %.3f\n", bytes, times[rounds / 2] * 1e6);
      fflush(stdout);
    }
    free(data);
  }
  free(times);
}
