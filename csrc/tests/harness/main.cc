// The main function of the program with all tests. By the name of a test's file, which is a link to
// the program, it runs only the tests of that file. Without a sanitizer it prints how many threads
// the tests have started: those of single_threaded_tests.txt must start none.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <string>
#include <string_view>

namespace {

int run_tests(int argc, char** argv) {
  doctest::Context context(argc, argv);
  const std::string_view path = argv[0];
  const std::string_view name = path.substr(path.rfind('/') + 1);
  if (name.ends_with("_test"))
    context.addFilter("source-file", ("*/" + std::string(name) + ".cc").c_str());
  return context.run();
}

}  // namespace

#if defined(HOROPLUG_TSAN) || defined(HOROPLUG_ASAN)

int main(int argc, char** argv) { return run_tests(argc, argv); }

#else

#include <dlfcn.h>
#include <malloc.h>
#include <pthread.h>

#include <atomic>
#include <cstdio>

namespace {
std::atomic<int> threads_started{0};
}  // namespace

// Replaces the function of the C library for all libraries of the process, and calls it.
extern "C" __attribute__((visibility("default"))) int pthread_create(
    pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* argument) {
  static const auto create =
      reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  threads_started.fetch_add(1, std::memory_order_relaxed);
  return create(thread, attributes, run, argument);
}

int main(int argc, char** argv) {
  // Large buffers are used again. By default the kernel would map and clear each one anew, which
  // takes a quarter of the time of tests with large tensors.
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  const int status = run_tests(argc, argv);
  std::printf("threads started: %d\n", threads_started.load());
  return status;
}

#endif
