// Tests of the compilation of kernels at run time, with a fake NVRTC, and of the kernel cache.
// HOROPLUG_TEST_NVRTC is the path of a real NVRTC to test as well.
#include <doctest/doctest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "base/status.h"
#include "device/cuda/jit/compile.h"
#include "device/cuda/jit/source.h"

namespace {

using namespace horoplug;
using namespace horoplug::cuda;
namespace fs = std::filesystem;

// The arguments and the number of calls of the fake compiler in this thread.
struct CompilerCalls {
  std::vector<std::string> options;
  std::string source;
  int headers = 0, programs = 0, compilations = 0;
  nvrtcResult result = kNvrtcSuccess;
};
thread_local CompilerCalls calls;

constexpr char kCubin[] = "machine code";
constexpr char kLog[] = "kernels.cu(7): error: no\n";

Nvrtc fake_nvrtc() {
  Nvrtc nvrtc;
  nvrtc.version = 12040;
  nvrtc.archs = {75, 80, 90};
  nvrtc.api.CreateProgram = [](nvrtcProgram*, const char* source, const char*, int headers,
                               const char* const*, const char* const*) -> nvrtcResult {
    calls.source = source;
    calls.headers = headers;
    ++calls.programs;
    return kNvrtcSuccess;
  };
  nvrtc.api.DestroyProgram = [](nvrtcProgram*) -> nvrtcResult {
    --calls.programs;
    return kNvrtcSuccess;
  };
  nvrtc.api.CompileProgram = [](nvrtcProgram, int count,
                                const char* const* options) -> nvrtcResult {
    calls.options.assign(options, options + count);
    ++calls.compilations;
    return calls.result;
  };
  nvrtc.api.GetCUBINSize = [](nvrtcProgram, std::size_t* bytes) -> nvrtcResult {
    *bytes = sizeof kCubin;
    return kNvrtcSuccess;
  };
  nvrtc.api.GetCUBIN = [](nvrtcProgram, char* cubin) -> nvrtcResult {
    std::memcpy(cubin, kCubin, sizeof kCubin);
    return kNvrtcSuccess;
  };
  nvrtc.api.GetPTXSize = [](nvrtcProgram, std::size_t* bytes) -> nvrtcResult {
    *bytes = 4;
    return kNvrtcSuccess;
  };
  nvrtc.api.GetPTX = [](nvrtcProgram, char* ptx) -> nvrtcResult {
    std::memcpy(ptx, "PTX", 4);
    return kNvrtcSuccess;
  };
  nvrtc.api.GetProgramLogSize = [](nvrtcProgram, std::size_t* bytes) -> nvrtcResult {
    *bytes = sizeof kLog;
    return kNvrtcSuccess;
  };
  nvrtc.api.GetProgramLog = [](nvrtcProgram, char* log) -> nvrtcResult {
    std::memcpy(log, kLog, sizeof kLog);
    return kNvrtcSuccess;
  };
  return nvrtc;
}

class Folder {
 public:
  Folder() {
    std::string name = (fs::temp_directory_path() / "horoplug-XXXXXX").string();
    REQUIRE((::mkdtemp(name.data()) != nullptr));
    path_ = name;
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

TEST_CASE("each kernel is compiled separately for the GPU's architecture, without contraction") {
  calls = {};
  const Nvrtc nvrtc = fake_nvrtc();
  const Compilation compilation = plan_compilation(nvrtc, "copy_32", 80);
  CHECK(compile_kernel(nvrtc.api, compilation) == std::string(kCubin, sizeof kCubin));
  CHECK(calls.options == std::vector<std::string>{"--std=c++17", "--fmad=false",
                                                  "--gpu-architecture=sm_80",
                                                  "-DHP_ONLY=HP_MOVE(copy_32,Raw32,Raw32)"});
  CHECK(calls.source.find("HP_ONLY") != std::string::npos);
  CHECK(calls.headers == static_cast<int>(kernel_headers().size()));
  CHECK(calls.programs == 0);
}

TEST_CASE("kernels for GPUs newer than NVRTC are compiled to PTX, older GPUs are rejected") {
  const Nvrtc nvrtc = fake_nvrtc();
  CHECK(plan_compilation(nvrtc, "copy_32", 90).arch == "sm_90");
  CHECK(plan_compilation(nvrtc, "copy_32", 86).arch == "compute_80");
  const Compilation newer = plan_compilation(nvrtc, "copy_32", 120);
  CHECK(newer.arch == "compute_90");
  CHECK(compile_kernel(nvrtc.api, newer) == std::string("PTX\0", 4));
  CHECK_THROWS_WITH_AS(plan_compilation(nvrtc, "copy_32", 70),
                       "the GPU (sm_70) is too old for NVRTC 12.4", Error);
  CHECK_THROWS_AS(plan_compilation(nvrtc, "copy_256", 90), Error);
}

TEST_CASE("the error message of a failed compilation has the compiler's log") {
  calls = {};
  calls.result = 6;
  const Nvrtc nvrtc = fake_nvrtc();
  CHECK_THROWS_WITH_AS(compile_kernel(nvrtc.api, plan_compilation(nvrtc, "copy_32", 90)),
                       "NVRTC cannot compile the kernel copy_32 (6): kernels.cu(7): error: no",
                       Error);
  CHECK(calls.programs == 0);
}

TEST_CASE("the cache key depends on the kernel, the architecture, the compiler and the source") {
  const Compilation one{"copy_32", "sm_90", 12040};
  CHECK(one.key() == Compilation{"copy_32", "sm_90", 12040}.key());
  CHECK(one.key() != Compilation{"copy_16", "sm_90", 12040}.key());
  CHECK(one.key() != Compilation{"copy_32", "sm_80", 12040}.key());
  CHECK(one.key() != Compilation{"copy_32", "sm_90", 12050}.key());
  std::vector<SourceFile> headers(kernel_headers().begin(), kernel_headers().end());
  CHECK(one.key() == one.key(headers));
  headers.back().text = "// the text in another version of horoplug";
  CHECK(one.key() != one.key(headers));
}

TEST_CASE("a kernel is compiled only once for all processes with the same cache") {
  calls = {};
  const Folder folder;
  const Nvrtc nvrtc = fake_nvrtc();
  const KernelCache cache(folder.path() / "kernels");
  CHECK(kernel_image(nvrtc, cache, "copy_32", 90) == std::string(kCubin, sizeof kCubin));
  CHECK(kernel_image(nvrtc, KernelCache(folder.path() / "kernels"), "copy_32", 90) ==
        std::string(kCubin, sizeof kCubin));
  CHECK(calls.compilations == 1);
  kernel_image(nvrtc, cache, "copy_32", 80);
  CHECK(calls.compilations == 2);
}

TEST_CASE(
    "cache files that are damaged, have another key, or can be written by others are ignored") {
  const Folder folder;
  const fs::path place = folder.path() / "kernels";
  const KernelCache cache(place);
  CHECK_FALSE(cache.find(1).has_value());
  cache.put(1, "one");
  CHECK(cache.find(1) == Image("one"));
  CHECK_FALSE(cache.find(2).has_value());
  const fs::path file = fs::directory_iterator(place)->path();
  const auto size = fs::file_size(file);
  for (const auto left : {size - 1, size - 3, std::uintmax_t{8}, std::uintmax_t{0}}) {
    fs::resize_file(file, left);
    CHECK_FALSE(cache.find(1).has_value());
  }
  cache.put(1, "one");
  CHECK(cache.find(1).has_value());
  std::fstream(file, std::ios::in | std::ios::out | std::ios::binary).seekp(-1, std::ios::end)
      << 'x';
  CHECK_FALSE(cache.find(1).has_value());
  cache.put(1, "one");
  fs::copy_file(file, place / "0000000000000002");
  CHECK_FALSE(cache.find(2).has_value());  // the file has another key
  ::chmod(place.c_str(), 0777);
  CHECK_FALSE(cache.find(1).has_value());  // any user can write to the folder
}

TEST_CASE("a cache without a writable folder stores nothing") {
  const KernelCache none{fs::path()};
  none.put(1, "one");
  CHECK_FALSE(none.find(1).has_value());
  const KernelCache impossible("/dev/null/kernels");
  impossible.put(1, "one");
  CHECK_FALSE(impossible.find(1).has_value());
}

TEST_CASE("concurrent writers of the same cache file do not corrupt it") {
  const Folder folder;
  const fs::path place = folder.path() / "kernels";
  const Image image(100000, 'x');
  std::vector<std::thread> writers;
  for (int i = 0; i < 4; ++i) {
    writers.emplace_back([&] {
      for (int n = 0; n < 10; ++n) {
        const KernelCache cache(place);
        cache.put(1, image);
        const auto found = cache.find(1);
        if (!found || *found != image) std::abort();
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  CHECK(std::distance(fs::directory_iterator(place), fs::directory_iterator{}) == 1);
}

TEST_CASE("a real NVRTC, if HOROPLUG_TEST_NVRTC names one, compiles the kernels") {
  const char* const path = std::getenv("HOROPLUG_TEST_NVRTC");
  if (path == nullptr) return;
  const Nvrtc nvrtc = open_nvrtc({{path}, false}, 0);
  REQUIRE(nvrtc.problem == "");
  for (const char* const kernel : {"copy_32", "sum_of_tiles"}) {
    const Image cubin = compile_kernel(nvrtc.api, plan_compilation(nvrtc, kernel, 90));
    CHECK(
        cubin.starts_with("\x7f"
                          "ELF"));
    CHECK(cubin.find(kernel) != std::string::npos);
    const Image ptx = compile_kernel(nvrtc.api, {kernel, "compute_75", nvrtc.version});
    CHECK(ptx.find(std::string(".entry ") + kernel) != std::string::npos);
  }
}

}  // namespace
