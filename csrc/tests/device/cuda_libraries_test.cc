// How libcuda, NVRTC and NCCL are found, and the messages for those that are missing, too old or
// broken.
#include <dlfcn.h>
#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "base/status.h"
#include "device/cuda/driver/capabilities.h"
#include "device/cuda/driver/driver.h"
#include "device/cuda/driver/nccl.h"
#include "device/cuda/driver/nvrtc.h"
#include "tests/harness/stubs.h"

namespace {

using namespace horoplug;
using namespace horoplug::cuda;
using horoplug::testing::stub;
namespace fs = std::filesystem;

// Searches only these files, and no other library of this machine.
LibraryPaths only(std::vector<std::string> files) { return {std::move(files), false}; }

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

bool is_one_line(const std::string& text) { return !text.empty() && !contains(text, "\n"); }

// A copy of a library that is truncated to `bytes` bytes.
class Damaged {
 public:
  Damaged(const std::string& original, std::uintmax_t bytes)
      : folder_(fs::temp_directory_path() / ("horoplug-" + std::to_string(::getpid()))),
        path_(folder_ / fs::path(original).filename()) {
    fs::create_directories(folder_);
    fs::copy_file(original, path_, fs::copy_options::overwrite_existing);
    fs::resize_file(path_, bytes);
  }
  ~Damaged() { fs::remove_all(folder_); }
  Damaged(const Damaged&) = delete;
  Damaged& operator=(const Damaged&) = delete;

  std::string path() const { return path_.string(); }

 private:
  fs::path folder_, path_;
};

TEST_CASE("working libraries are opened and their versions are read") {
  const Driver driver = open_driver(only({stub("good", "libcuda.so.1")}));
  CHECK(driver.problem == "");
  CHECK(driver.version == 12040);
  CHECK(driver.path == stub("good", "libcuda.so.1"));
  CHECK(start_driver(driver.api) == "");
  const DeviceProperties device = device_properties(driver.api, 0);
  CHECK(device.name == "Stub");
  CHECK(device.major == 9);
  CHECK(device.memory == std::size_t{80} << 30);

  const Nvrtc nvrtc = open_nvrtc(only({stub("good", "libnvrtc.so.12")}), driver.version);
  CHECK(nvrtc.problem == "");
  CHECK(nvrtc.version == 12040);
  CHECK(nvrtc.archs == std::vector<int>{75, 80, 90});

  const Nccl nccl = open_nccl(only({stub("good", "libnccl.so.2")}));
  CHECK(nccl.problem == "");
  CHECK(nccl_version(nccl.version) == "2.23.4");
}

TEST_CASE("missing libraries are reported by their file names") {
  CHECK(open_driver(only({})).problem == "libcuda.so.1: not found");
  CHECK(open_driver(only({"/nonexistent/libcuda.so.1"})).problem ==
        "/nonexistent/libcuda.so.1: cannot be read");
  CHECK(open_nvrtc(only({}), 0).problem == "libnvrtc.so.13, libnvrtc.so.12: not found");
  // A file with the name of another library is not used.
  CHECK(open_nccl(only({stub("good", "libcuda.so.1")})).problem == "libnccl.so.2: not found");
}

TEST_CASE("libraries that are too old, or too new for the driver, are rejected with the reason") {
  const Driver driver = open_driver(only({stub("old", "libcuda.so.1")}));
  CHECK(contains(driver.problem, "/old/libcuda.so.1: the driver is for CUDA 11.4, which is too"));
  CHECK((driver.api.Init == nullptr));
  CHECK(contains(open_nvrtc(only({stub("old", "libnvrtc.so.12")}), 0).problem,
                 "version 11.8 is too old: 12.0 is needed"));
  CHECK(contains(open_nccl(only({stub("old", "libnccl.so.2")})).problem,
                 "version 2.8.4 is too old: 2.18.0 is needed"));

  CHECK(open_driver(only({stub("oldest", "libcuda.so.1")})).problem == "");
  CHECK(open_nvrtc(only({stub("oldest", "libnvrtc.so.12")}), 12000).problem == "");
  CHECK(open_nccl(only({stub("oldest", "libnccl.so.2")})).problem == "");

  const LibraryPaths both = only({stub("new", "libnvrtc.so.13"), stub("good", "libnvrtc.so.12")});
  CHECK(open_nvrtc(both, 13000).version == 13010);
  CHECK(open_nvrtc(both, 12040).version == 12040);
  CHECK(contains(open_nvrtc(only({stub("new", "libnvrtc.so.13")}), 12040).problem,
                 "version 13.1 is too new for the driver, which is for CUDA 12.4"));
}

TEST_CASE("broken libraries are rejected with a reason of one line") {
  const Driver incomplete = open_driver(only({stub("incomplete", "libcuda.so.1")}));
  CHECK(contains(incomplete.problem, "has no cuInit"));
  CHECK((incomplete.api.DriverGetVersion == nullptr));  // none of its functions can be called
  CHECK(contains(open_nvrtc(only({stub("incomplete", "libnvrtc.so.12")}), 0).problem,
                 "has no nvrtc"));
  CHECK(contains(open_nccl(only({stub("incomplete", "libnccl.so.2")})).problem, "has no nccl"));
  CHECK(contains(open_driver(only({stub("failing", "libcuda.so.1")})).problem,
                 "cuDriverGetVersion fails with 999"));
  CHECK(contains(open_nccl(only({stub("failing", "libnccl.so.2")})).problem,
                 "ncclGetVersion fails with 3"));

  const Driver stopped = open_driver(only({stub("stopped", "libcuda.so.1")}));
  REQUIRE(stopped.ok());
  CHECK(start_driver(stopped.api) == "cuInit: CUDA_ERROR_STUB (as the test wants it)");
  CHECK_THROWS_WITH_AS(check(stopped.api, 100, "cuInit"),
                       "cuInit: CUDA_ERROR_STUB (as the test wants it)", Error);

  // Truncated files are rejected before the dynamic loader opens them, which some would crash.
  const std::string whole = stub("good", "libcuda.so.1");
  const std::uintmax_t size = fs::file_size(whole);
  for (const std::uintmax_t left :
       {std::uintmax_t{0}, std::uintmax_t{40}, std::uintmax_t{200}, std::uintmax_t{4096}}) {
    REQUIRE(left < size);
    const Damaged damaged(whole, left);
    const std::string problem = open_driver(only({damaged.path()})).problem;
    CAPTURE(problem);
    CHECK(is_one_line(problem));
    CHECK(contains(problem, damaged.path()));
  }
}

TEST_CASE("candidates that cannot be used are skipped") {
  const LibraryPaths places = only({"/nonexistent/libcuda.so.1", stub("old", "libcuda.so.1"),
                                    stub("good", "libcuda.so.1"), stub("stopped", "libcuda.so.1")});
  CHECK(open_driver(places).path == stub("good", "libcuda.so.1"));
}

TEST_CASE("the diagnostics have one line for each GPU library and for the kernels") {
  const auto good =
      gpu_capabilities(only({stub("good", "libcuda.so.1"), stub("good", "libnvrtc.so.12"),
                             stub("good", "libnccl.so.2")}));
  REQUIRE(good.size() == 4);
  CHECK(contains(good[0], "[X] CUDA driver 12.4: Stub (sm_90, 80 GiB) ("));
  CHECK(contains(good[1], "[X] NVRTC 12.4 ("));
  CHECK(contains(good[2], "[X] NCCL 2.23.4 ("));
  CHECK(contains(good[3], "[X] Kernels of NVRTC (compiled"));
  const auto bad =
      gpu_capabilities(only({stub("stopped", "libcuda.so.1"), stub("new", "libnvrtc.so.13"),
                             stub("old", "libnccl.so.2")}));
  REQUIRE(bad.size() == 4);
  CHECK(contains(bad[0], "[ ] CUDA driver 12.4: "));
  CHECK(contains(bad[0], "CUDA_ERROR_STUB"));
  CHECK(contains(bad[1], "[ ] NVRTC: "));
  CHECK(contains(bad[2], "[ ] NCCL: "));
  CHECK(contains(bad[3], "[ ] Kernels: "));
  for (const std::string& line : bad) CHECK(is_one_line(line));
  for (const std::string& line : gpu_capabilities({})) CHECK(is_one_line(line));
}

// The last test, because loaded libraries are never unloaded.
TEST_CASE("a library that the process has already loaded takes precedence") {
  if (::dlopen("libnccl.so.2", RTLD_NOLOAD | RTLD_LAZY) != nullptr) return;
  void* const loaded = ::dlopen(stub("good", "libnccl.so.2").c_str(), RTLD_NOW | RTLD_LOCAL);
  REQUIRE((loaded != nullptr));
  const Nccl nccl = open_nccl({{stub("old", "libnccl.so.2")}, true});
  CHECK(nccl.problem == "");
  CHECK(nccl.path == stub("good", "libnccl.so.2"));
}

}  // namespace
