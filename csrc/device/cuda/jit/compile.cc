#include "device/cuda/jit/compile.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <vector>

#include "base/hash.h"
#include "base/status.h"

namespace horoplug::cuda {
namespace {

namespace fs = std::filesystem;

// No contraction to fused multiply-add, as on the CPU: the same bits everywhere.
constexpr std::array<const char*, 2> kOptions = {"--std=c++17", "--fmad=false"};

// A file of the cache: this, then the image.
struct Header {
  char magic[8];
  std::uint64_t key;
  std::uint64_t bytes;
  std::uint64_t hash;
};
constexpr char kMagic[8] = {'h', 'p', 'k', 'e', 'r', 'n', 'e', '1'};

Header header_of(std::uint64_t key, const Image& image) {
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.key = key;
  header.bytes = image.size();
  header.hash = Hash().add(std::string_view(image)).value();
  return header;
}

// Code from this folder is executed, so only this user may be able to write there.
bool is_ours(const fs::path& folder) {
  struct stat status{};
  return ::stat(folder.c_str(), &status) == 0 && S_ISDIR(status.st_mode) &&
         status.st_uid == ::geteuid() && (status.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

class Program {
 public:
  explicit Program(const NvrtcApi& api) : api_(api) {
    std::vector<const char*> names, texts;
    for (const SourceFile& header : kernel_headers()) {
      names.push_back(header.name);
      texts.push_back(header.text);
    }
    check(api_.CreateProgram(&program_, kernel_source().text, kernel_source().name,
                             static_cast<int>(names.size()), texts.data(), names.data()),
          "nvrtcCreateProgram");
  }
  ~Program() { api_.DestroyProgram(&program_); }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  void compile(const std::vector<std::string>& options, const std::string& kernel) {
    std::vector<const char*> texts;
    for (const std::string& option : options) texts.push_back(option.c_str());
    const nvrtcResult result =
        api_.CompileProgram(program_, static_cast<int>(texts.size()), texts.data());
    if (result == kNvrtcSuccess) return;
    throw Error(HP_INTERNAL, "NVRTC cannot compile the kernel " + kernel + " (" +
                                 std::to_string(result) + "): " + log());
  }

  Image image(bool is_ptx) {
    return read(is_ptx ? api_.GetPTXSize : api_.GetCUBINSize, is_ptx ? api_.GetPTX : api_.GetCUBIN,
                "the code");
  }

 private:
  static void check(nvrtcResult result, const char* call) {
    if (result == kNvrtcSuccess) return;
    throw Error(HP_INTERNAL, std::string(call) + " fails with " + std::to_string(result));
  }
  template <typename Size, typename Get>
  std::string read(Size size, Get get, const char* what) {
    std::size_t bytes = 0;
    check(size(program_, &bytes), what);
    std::string text(bytes, '\0');
    check(get(program_, text.data()), what);
    return text;
  }
  std::string log() {
    std::string text = read(api_.GetProgramLogSize, api_.GetProgramLog, "the log");
    while (!text.empty() && (text.back() == '\0' || text.back() == '\n')) text.pop_back();
    return text;
  }

  const NvrtcApi& api_;
  nvrtcProgram program_ = nullptr;
};

}  // namespace

std::uint64_t source_key(std::span<const SourceFile> headers) {
  Hash hash;
  for (const char* option : kOptions) hash.add(std::string_view(option));
  hash.add(std::string_view(kernel_source().text));
  for (const SourceFile& header : headers) hash.add(std::string_view(header.text));
  return hash.value();
}

std::uint64_t Compilation::key(std::span<const SourceFile> headers) const {
  Hash hash;
  hash.add(std::string_view(kernel)).add(std::string_view(arch));
  hash.add(static_cast<std::uint64_t>(nvrtc_version)).add(source_key(headers));
  return hash.value();
}

Compilation plan_compilation(const Nvrtc& nvrtc, const std::string& kernel, int capability) {
  if (find_kernel(kernel) == nullptr) throw Error(HP_UNSUPPORTED, "no kernel named " + kernel);
  const auto above = std::upper_bound(nvrtc.archs.begin(), nvrtc.archs.end(), capability);
  if (above == nvrtc.archs.begin()) {
    throw Error(HP_UNSUPPORTED, "the GPU (sm_" + std::to_string(capability) +
                                    ") is too old for NVRTC " + cuda_version(nvrtc.version));
  }
  const int arch = *std::prev(above);
  return {kernel, (arch == capability ? "sm_" : "compute_") + std::to_string(arch), nvrtc.version};
}

Image compile_kernel(const NvrtcApi& nvrtc, const Compilation& compilation) {
  std::vector<std::string> options(kOptions.begin(), kOptions.end());
  options.push_back("--gpu-architecture=" + compilation.arch);
  options.emplace_back(find_kernel(compilation.kernel)->only);
  Program program(nvrtc);
  program.compile(options, compilation.kernel);
  return program.image(compilation.arch.starts_with("compute_"));
}

fs::path KernelCache::default_folder() {
  const auto variable = [](const char* name) {
    const char* const value = std::getenv(name);
    return fs::path(value != nullptr ? value : "");
  };
  fs::path base = variable("XDG_CACHE_HOME");
  if (!base.is_absolute()) {  // as its specification wants it
    base = variable("HOME");
    if (!base.is_absolute()) return {};
    base /= ".cache";
  }
  return base / "horoplug" / "kernels";
}

fs::path KernelCache::file(std::uint64_t key) const {
  char name[32];
  std::snprintf(name, sizeof name, "%016llx", static_cast<unsigned long long>(key));
  return folder_ / name;
}

std::optional<Image> KernelCache::find(std::uint64_t key) const {
  if (folder_.empty() || !is_ours(folder_)) return std::nullopt;
  std::ifstream file(this->file(key), std::ios::binary);
  Header header{};
  if (!file.read(reinterpret_cast<char*>(&header), sizeof header)) return std::nullopt;
  Image image{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  const Header expected = header_of(key, image);
  if (std::memcmp(&header, &expected, sizeof header) != 0) return std::nullopt;
  return image;
}

void KernelCache::put(std::uint64_t key, const Image& image) const {
  if (folder_.empty()) return;
  std::error_code failure;
  fs::create_directories(folder_.parent_path(), failure);
  ::mkdir(folder_.c_str(), 0700);
  if (!is_ours(folder_)) return;
  // Under a name of its own first: other processes see all of it or nothing.
  std::string temporary = (folder_ / "new-XXXXXX").string();
  const int fd = ::mkstemp(temporary.data());
  if (fd < 0) return;
  ::close(fd);
  const Header header = header_of(key, image);
  std::ofstream file(temporary, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&header), sizeof header);
  file.write(image.data(), static_cast<std::streamsize>(image.size()));
  file.close();
  if (file) fs::rename(temporary, this->file(key), failure);
  if (!file || failure) fs::remove(temporary, failure);
}

Image kernel_image(const Nvrtc& nvrtc, const KernelCache& cache, const std::string& kernel,
                   int capability) {
  const Compilation compilation = plan_compilation(nvrtc, kernel, capability);
  const std::uint64_t key = compilation.key();
  if (std::optional<Image> known = cache.find(key)) return *std::move(known);
  Image image = compile_kernel(nvrtc.api, compilation);
  cache.put(key, image);
  return image;
}

}  // namespace horoplug::cuda
