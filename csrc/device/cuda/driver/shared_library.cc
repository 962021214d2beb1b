#include "device/cuda/driver/shared_library.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace horoplug::cuda {
namespace {

namespace fs = std::filesystem;

std::string one_line(std::string text) {
  for (char& c : text) {
    if (c == '\n' || c == '\r') c = ' ';
  }
  return text;
}

std::string path_of(void* handle, const std::string& otherwise) {
  struct link_map* map = nullptr;
  const bool known =
      ::dlinfo(handle, RTLD_DI_LINKMAP, static_cast<void*>(&map)) == 0 && map != nullptr;
  return known && map->l_name != nullptr && *map->l_name != '\0' ? map->l_name : otherwise;
}

// The file that the loader will most likely open for a soname; empty if it is in none of these
// folders.
std::string likely_file(const std::string& name) {
  std::vector<std::string> folders;
  if (const char* configured = std::getenv("LD_LIBRARY_PATH")) {
    std::istringstream list(configured);
    for (std::string folder; std::getline(list, folder, ':');) folders.push_back(folder);
  }
  for (const char* folder :
       {"/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib"}) {
    folders.emplace_back(folder);
  }
  for (const std::string& folder : folders) {
    std::error_code ignored;
    const fs::path path = fs::path(folder.empty() ? "." : folder) / name;
    if (fs::exists(path, ignored)) return path.string();
  }
  return {};
}

class Finder {
 public:
  explicit Finder(const Inspect& inspect) : inspect_(inspect) {}

  // Returns whether the search is over. `file`: the file to check before it is opened.
  bool try_one(const std::string& name, int flags, const std::string& file) {
    if (!file.empty()) {
      const std::string damage = check_library_file(file);
      if (!damage.empty()) return reject(file, damage);
    }
    void* const handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | flags);
    if (handle == nullptr) {
      // A library that does not exist is not reported as defective.
      const char* const reason = ::dlerror();
      if ((flags & RTLD_NOLOAD) != 0 || file.empty()) return false;
      return reject(file, reason != nullptr ? reason : "cannot be opened");
    }
    const std::string path = path_of(handle, name);
    const std::string problem = inspect_(handle);
    if (!problem.empty()) return reject(path, problem);
    found_ = {handle, path, {}};
    return true;
  }

  Found take(const std::vector<std::string>& names) {
    if (found_.handle != nullptr) return found_;
    found_.problem = rejected_;
    if (rejected_.empty()) {
      for (const std::string& name : names) {
        found_.problem += (found_.problem.empty() ? "" : ", ") + name;
      }
      found_.problem += ": not found";
    }
    return found_;
  }

 private:
  bool reject(const std::string& path, const std::string& why) {
    // The loader's messages begin with the path already.
    std::string line = why.find(path) == std::string::npos ? path + ": " + why : why;
    line = one_line(std::move(line));
    if (rejected_.find(line) != std::string::npos) return false;  // the same file by another path
    rejected_ += (rejected_.empty() ? "" : "; ") + line;
    return false;
  }

  const Inspect& inspect_;
  Found found_;
  std::string rejected_;
};

}  // namespace

std::string check_library_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return "cannot be read";
  std::error_code failure;
  const std::uint64_t size = fs::file_size(path, failure);
  Elf64_Ehdr header{};
  file.read(reinterpret_cast<char*>(&header), sizeof header);
  if (failure || !file || std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 ||
      header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_phentsize != sizeof(Elf64_Phdr)) {
    return "is no 64-bit library";
  }
  file.seekg(static_cast<std::streamoff>(header.e_phoff));
  for (int i = 0; i < header.e_phnum; ++i) {
    Elf64_Phdr segment{};
    file.read(reinterpret_cast<char*>(&segment), sizeof segment);
    const bool cut_short = segment.p_type == PT_LOAD &&
                           (segment.p_offset > size || segment.p_filesz > size - segment.p_offset);
    if (!file || cut_short) return "is truncated";
  }
  return {};
}

Found find_library(const std::vector<std::string>& names, const LibraryPaths& places,
                   const Inspect& inspect) {
  Finder finder(inspect);
  const auto is_named = [&](const std::string& path) {
    return std::find(names.begin(), names.end(), fs::path(path).filename()) != names.end();
  };
  for (const std::string& name : names) {
    if (places.elsewhere && finder.try_one(name, RTLD_NOLOAD, {})) return finder.take(names);
  }
  for (const std::string& file : places.files) {
    if (is_named(file) && finder.try_one(file, 0, file)) return finder.take(names);
  }
  for (const std::string& name : names) {
    if (places.elsewhere && finder.try_one(name, 0, likely_file(name))) return finder.take(names);
  }
  return finder.take(names);
}

void* find_symbol(void* library, const char* name) { return ::dlsym(library, name); }

std::string cuda_version(int number) {
  return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
}

}  // namespace horoplug::cuda
