#include "device/cuda/jit/kernel_file.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "base/hash.h"

namespace horoplug::cuda {
namespace {

namespace fs = std::filesystem;

constexpr char kMakeAnew[] = "make kernels makes a new one";

std::string read(std::uint64_t source, int driver_version, KernelFile& file) {
  struct stat status{};
  if (::stat(file.path.c_str(), &status) != 0 || !S_ISREG(status.st_mode)) return "cannot be read";
  // Code from this file is executed. Its folder is as safe as that of libhoroplug.so, which is the
  // same one.
  if ((status.st_mode & S_IWOTH) != 0) return "anybody can write it, so it is not used (chmod o-w)";
  std::ifstream stream(file.path, std::ios::binary);
  if (!stream) return "cannot be read";
  KernelFileHeader header{};
  stream.read(reinterpret_cast<char*>(&header), sizeof header);
  if (!stream || std::memcmp(header.magic, kKernelFileMagic, sizeof header.magic) != 0) {
    return std::string("is no file of kernels; ") + kMakeAnew;
  }
  if (header.source != source) {
    return std::string("was made from another version of the kernels; ") + kMakeAnew;
  }
  file.version = header.version;
  file.ptx = header.ptx;
  std::copy_if(std::begin(header.archs), std::end(header.archs), std::back_inserter(file.archs),
               [](std::int32_t arch) { return arch != 0; });
  if (driver_version != 0 && file.version / 1000 > driver_version / 1000) {
    return "is by nvcc " + cuda_version(file.version) + ", too new for the driver, which is for " +
           "CUDA " + cuda_version(driver_version);
  }
  file.image.assign(std::istreambuf_iterator<char>(stream), {});
  if (file.image.size() != header.bytes ||
      Hash().add(std::string_view(file.image)).value() != header.hash) {
    return std::string("is damaged; ") + kMakeAnew;
  }
  return {};
}

}  // namespace

bool KernelFile::fits(int capability) const {
  const auto runs = [capability](int arch) {
    return arch / 10 == capability / 10 && arch <= capability;
  };
  return std::any_of(archs.begin(), archs.end(), runs) || (ptx != 0 && ptx <= capability);
}

std::string KernelFile::describe() const {
  std::string text;
  const auto add = [&text](const std::string& what) { text += (text.empty() ? "" : ", ") + what; };
  for (const int arch : archs) add("sm_" + std::to_string(arch));
  if (ptx != 0) add("PTX");
  return "nvcc " + cuda_version(version) + ": " + text;
}

KernelFile open_kernel_file(const LibraryPaths& places, int driver_version, std::uint64_t source) {
  KernelFile file;
  const auto found =
      std::find_if(places.files.begin(), places.files.end(), [](const std::string& path) {
        return fs::path(path).filename().string().find(".so") == std::string::npos;
      });
  if (found == places.files.end()) {
    file.problem = "kernels.fatbin: not found";
    return file;
  }
  file.path = *found;
  const std::string problem = read(source, driver_version, file);
  if (problem.empty()) return file;
  file.problem = file.path + ": " + problem;
  file.image.clear();
  return file;
}

}  // namespace horoplug::cuda
