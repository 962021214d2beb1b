// Tests of the file of kernels that nvcc compiles, which is used where NVRTC is missing.
#include "device/cuda/jit/kernel_file.h"

#include <doctest/doctest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

#include "base/hash.h"
#include "base/status.h"
#include "device/cuda/driver/capabilities.h"
#include "device/cuda/jit/kernel_code.h"
#include "tests/harness/stubs.h"

namespace {

using namespace horoplug;
using namespace horoplug::cuda;
using horoplug::testing::stub;
namespace fs = std::filesystem;

const std::string kCode = "code of all kernels";

// A kernels.fatbin in its own temporary folder.
class File {
 public:
  File() {
    std::string name = (fs::temp_directory_path() / "horoplug-XXXXXX").string();
    REQUIRE((::mkdtemp(name.data()) != nullptr));
    folder_ = name;
    std::memcpy(header.magic, kKernelFileMagic, sizeof header.magic);
    header.source = source_key();
    header.bytes = kCode.size();
    header.hash = Hash().add(std::string_view(kCode)).value();
    header.version = 12080;
    header.ptx = 75;
    header.archs[0] = 80;
    header.archs[1] = 90;
    write();
  }
  ~File() {
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  fs::path path() const { return folder_ / "kernels.fatbin"; }
  LibraryPaths places() const { return {{stub("good", "libcuda.so.1"), path().string()}, false}; }

  void write(const std::string& code = kCode) const {
    std::ofstream file(path(), std::ios::binary);
    file.write(reinterpret_cast<const char*>(&header), sizeof header);
    file << code;
  }
  std::string problem(int driver_version = 0) const {
    return open_kernel_file(places(), driver_version).problem;
  }

  KernelFileHeader header{};

 private:
  fs::path folder_;
};

bool has_part(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// A missing NVRTC, and one for these architectures.
Nvrtc missing() {
  Nvrtc nvrtc;
  nvrtc.problem = "libnvrtc.so.13, libnvrtc.so.12: not found";
  return nvrtc;
}
Nvrtc for_archs(std::vector<int> archs) {
  Nvrtc nvrtc;
  nvrtc.version = 13010;
  nvrtc.archs = std::move(archs);
  return nvrtc;
}

TEST_CASE("a valid file with PTX supports the GPUs of its architectures and newer ones") {
  const File made;
  const KernelFile file = open_kernel_file(made.places(), 12040);
  REQUIRE(file.problem == "");
  CHECK(file.path == made.path().string());
  CHECK(file.image == kCode);
  CHECK(file.describe() == "nvcc 12.8: sm_80, sm_90, PTX");
  for (const int gpu : {75, 80, 86, 90, 100, 120}) CHECK(file.fits(gpu));
  CHECK_FALSE(file.fits(70));
}

TEST_CASE("a file without PTX supports only GPUs of the same major versions") {
  File made;
  made.header.ptx = 0;
  made.header.archs[0] = 86;
  made.write();
  const KernelFile file = open_kernel_file(made.places(), 0);
  CHECK(file.describe() == "nvcc 12.8: sm_86, sm_90");
  for (const int gpu : {86, 89, 90}) CHECK(file.fits(gpu));
  for (const int gpu : {75, 80, 100}) CHECK_FALSE(file.fits(gpu));
}

TEST_CASE("files that are missing, outdated, damaged, foreign or writable by others are rejected") {
  CHECK(open_kernel_file({}, 0).problem == "kernels.fatbin: not found");
  CHECK(open_kernel_file({{"/nonexistent/kernels.fatbin"}, false}, 0).problem ==
        "/nonexistent/kernels.fatbin: cannot be read");

  File file;
  const std::string start = file.path().string() + ": ";
  CHECK(file.problem() == "");
  CHECK(file.problem(13000) == "");
  CHECK(has_part(file.problem(11080), "is by nvcc 12.8, too new for the driver, which is for "));

  // Truncated at every length, and too long.
  for (std::uintmax_t left = 0; left < sizeof file.header + kCode.size(); ++left) {
    file.write();
    fs::resize_file(file.path(), left);
    CHECK(file.problem().starts_with(start + "is "));
  }
  file.write(kCode + " ");
  CHECK(has_part(file.problem(), "is damaged"));
  std::string other = kCode;
  other.back() ^= 1;
  file.write(other);
  CHECK(has_part(file.problem(), "is damaged; make kernels makes a new one"));
  CHECK(open_kernel_file(file.places(), 0).image.empty());

  file.header.source ^= 1;
  file.write();
  CHECK(has_part(file.problem(), "was made from another version of the kernels; make kernels"));
  file.header.source ^= 1;
  file.header.magic[0] = 'x';
  file.write();
  CHECK(has_part(file.problem(), "is no file of kernels"));

  file.header.magic[0] = 'h';
  file.write();
  CHECK(file.problem() == "");
  ::chmod(file.path().c_str(), 0666);
  CHECK(has_part(file.problem(), "anybody can write it"));
}

TEST_CASE("the file is used if NVRTC is missing or does not support the GPU") {
  const File file;
  const KernelCache none{fs::path()};
  const ImageSource code = kernel_code(missing(), file.places(), 12040, none);
  const auto copy = code("copy_32", 90);
  CHECK(*copy == kCode);
  CHECK(code("copy_16", 90) == copy);  // the same object
  CHECK_THROWS_WITH_AS(
      code("copy_32", 70),
      ("tensors on a GPU need horoplug's kernels, which NVRTC compiles: libnvrtc.so.13, "
       "libnvrtc.so.12: not found; and " +
       file.path().string() +
       ": has none for the GPU (sm_70); install nvidia-cuda-nvrtc of the driver's CUDA version, or "
       "compile the kernels with nvcc: make kernels")
          .c_str(),
      Error);

  // A GPU that NVRTC no longer supports.
  CHECK(*kernel_code(for_archs({80, 90}), file.places(), 12040, none)("copy_32", 75) == kCode);
  CHECK_THROWS_WITH_AS(
      kernel_code(for_archs({80, 90}), {}, 13010, none)("copy_32", 75),
      "tensors on a GPU need horoplug's kernels, which NVRTC compiles: the GPU (sm_75) is too old "
      "for NVRTC 13.1; and kernels.fatbin: not found; install nvidia-cuda-nvrtc of the driver's "
      "CUDA version, or compile the kernels with nvcc: make kernels",
      Error);
}

TEST_CASE("the diagnostics say where the kernels come from") {
  const File file;
  LibraryPaths places = file.places();
  CHECK(gpu_capabilities(places).back() ==
        "[X] Kernels of nvcc 12.8: sm_80, sm_90, PTX (" + file.path().string() + ")");
  places.files.push_back(stub("good", "libnvrtc.so.12"));
  CHECK(gpu_capabilities(places).back() == "[X] Kernels of NVRTC (compiled when first used)");
  places.files = {stub("good", "libcuda.so.1")};
  CHECK(gpu_capabilities(places).back() ==
        "[ ] Kernels: libnvrtc.so.13, libnvrtc.so.12: not found; and kernels.fatbin: not found; "
        "install nvidia-cuda-nvrtc of the driver's CUDA version, or compile the kernels with nvcc: "
        "make kernels");
}

}  // namespace
