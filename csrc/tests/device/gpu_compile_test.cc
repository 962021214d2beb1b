// Kernels compiled at run time, by an NVRTC that only pretends to, and the cache of what it gave.
// HOROPLUG_TEST_NVRTC names a real one to try too.
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

// What the pretended compiler was asked, in this thread.
struct Asked {
  std::vector<std::string> options;
  std::string source;
  int headers = 0, programs = 0, compilations = 0;
  nvrtcResult result = kNvrtcSuccess;
};
thread_local Asked asked;

constexpr char kCubin[] = "machine code";
constexpr char kLog[] = "kernels.cu(7): error: no\n";

Nvrtc pretended() {
  Nvrtc nvrtc;
  nvrtc.version = 12040;
  nvrtc.archs = {75, 80, 90};
  nvrtc.api.CreateProgram = [](nvrtcProgram*, const char* source, const char*, int headers,
                               const char* const*, const char* const*) -> nvrtcResult {
    asked.source = source;
    asked.headers = headers;
    ++asked.programs;
    return kNvrtcSuccess;
  };
  nvrtc.api.DestroyProgram = [](nvrtcProgram*) -> nvrtcResult {
    --asked.programs;
    return kNvrtcSuccess;
  };
  nvrtc.api.CompileProgram = [](nvrtcProgram, int count,
                                const char* const* options) -> nvrtcResult {
    asked.options.assign(options, options + count);
    ++asked.compilations;
    return asked.result;
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

TEST_CASE("a kernel is compiled alone, for the GPU, without contraction") {
  asked = {};
  const Nvrtc nvrtc = pretended();
  const Compilation compilation = plan_compilation(nvrtc, "copy_32", 80);
  CHECK(compile_kernel(nvrtc.api, compilation) == std::string(kCubin, sizeof kCubin));
  CHECK(asked.options == std::vector<std::string>{"--std=c++17", "--fmad=false",
                                                  "--gpu-architecture=sm_80",
                                                  "-DHP_ONLY=HP_MOVE(copy_32,Raw32,Raw32)"});
  CHECK(asked.source.find("HP_ONLY") != std::string::npos);
  CHECK(asked.headers == static_cast<int>(kernel_headers().size()));
  CHECK(asked.programs == 0);
}

TEST_CASE("GPUs that are newer or older than the compiler") {
  const Nvrtc nvrtc = pretended();
  CHECK(plan_compilation(nvrtc, "copy_32", 90).arch == "sm_90");
  CHECK(plan_compilation(nvrtc, "copy_32", 86).arch == "compute_80");
  const Compilation newer = plan_compilation(nvrtc, "copy_32", 120);
  CHECK(newer.arch == "compute_90");
  CHECK(compile_kernel(nvrtc.api, newer) == std::string("PTX\0", 4));
  CHECK_THROWS_WITH_AS(plan_compilation(nvrtc, "copy_32", 70),
                       "the GPU (sm_70) is too old for NVRTC 12.4", Error);
  CHECK_THROWS_AS(plan_compilation(nvrtc, "copy_256", 90), Error);
}

TEST_CASE("what the compiler says about an error is in the message") {
  asked = {};
  asked.result = 6;
  const Nvrtc nvrtc = pretended();
  CHECK_THROWS_WITH_AS(compile_kernel(nvrtc.api, plan_compilation(nvrtc, "copy_32", 90)),
                       "NVRTC cannot compile the kernel copy_32 (6): kernels.cu(7): error: no",
                       Error);
  CHECK(asked.programs == 0);
}

TEST_CASE("the key of the cache is of all that a kernel depends on") {
  const Compilation one{"copy_32", "sm_90", 12040};
  CHECK(one.key() == Compilation{"copy_32", "sm_90", 12040}.key());
  CHECK(one.key() != Compilation{"copy_16", "sm_90", 12040}.key());
  CHECK(one.key() != Compilation{"copy_32", "sm_80", 12040}.key());
  CHECK(one.key() != Compilation{"copy_32", "sm_90", 12050}.key());
  std::vector<SourceFile> headers(kernel_headers().begin(), kernel_headers().end());
  CHECK(one.key() == one.key(headers));
  headers.back().text = "// as another version of horoplug has it";
  CHECK(one.key() != one.key(headers));
}

TEST_CASE("a kernel is compiled once for all processes") {
  asked = {};
  const Folder folder;
  const Nvrtc nvrtc = pretended();
  const KernelCache cache(folder.path() / "kernels");
  CHECK(kernel_image(nvrtc, cache, "copy_32", 90) == std::string(kCubin, sizeof kCubin));
  CHECK(kernel_image(nvrtc, KernelCache(folder.path() / "kernels"), "copy_32", 90) ==
        std::string(kCubin, sizeof kCubin));
  CHECK(asked.compilations == 1);
  kernel_image(nvrtc, cache, "copy_32", 80);
  CHECK(asked.compilations == 2);
}

TEST_CASE("files of the cache that are damaged or of others are as if they were not there") {
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
  CHECK_FALSE(cache.find(2).has_value());  // the file of another key
  ::chmod(place.c_str(), 0777);
  CHECK_FALSE(cache.find(1).has_value());  // anybody may have written it
}

TEST_CASE("where nothing can be kept, nothing is") {
  const KernelCache none{fs::path()};
  none.put(1, "one");
  CHECK_FALSE(none.find(1).has_value());
  const KernelCache impossible("/dev/null/kernels");
  impossible.put(1, "one");
  CHECK_FALSE(impossible.find(1).has_value());
}

TEST_CASE("processes that write the same file do not disturb each other") {
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

TEST_CASE("a real NVRTC, if one is named") {
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
