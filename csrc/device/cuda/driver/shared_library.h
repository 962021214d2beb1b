// Finding a shared library at run time, so that nothing is linked.
//
// A process must not have two copies of CUDA's libraries: a copy that a framework has already
// loaded comes first, then known paths (PyPI's wheels), then the system's libraries.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace horoplug::cuda {

// Files to try, best first. Files with other names than the wanted ones are skipped.
struct LibraryPaths {
  std::vector<std::string> files;
  bool elsewhere = true;  // also libraries that are already loaded, and the system's paths
};

struct Found {
  void* handle = nullptr;  // never closed: these libraries do not support that
  std::string path;
  std::string problem;  // why no library was found, in one line
};

// Returns the problem of a library that could be opened, in one line, or an empty string.
using Inspect = std::function<std::string(void* handle)>;

// The first library that can be opened and in which `inspect` finds no problem. `names`: the
// possible sonames, best first.
Found find_library(const std::vector<std::string>& names, const LibraryPaths& places,
                   const Inspect& inspect);

// A library with its table of functions.
template <typename Api>
struct Opened {
  Api api;
  int version = 0;
  std::string path;
  std::string problem;  // one line; empty: it can be used, and the table is complete

  bool ok() const { return problem.empty(); }
};

// Opens one of these. inspect(handle, library) fills in the function table and the other fields,
// and returns the problem.
template <typename Library, typename InspectLibrary>
Library open_library(const std::vector<std::string>& names, const LibraryPaths& places,
                     const InspectLibrary& inspect) {
  Library library;
  const Found found = find_library(names, places, [&](void* handle) {
    library = {};
    return inspect(handle, library);
  });
  library.path = found.path;
  library.problem = found.problem;
  if (!library.ok()) library.api = {};
  return library;
}

// The problem of a file that is to be opened as a library, or an empty string. dlopen checks
// little: it maps a truncated file, and the process crashes.
std::string check_library_file(const std::string& path);

// Looks up one function.
template <typename Function>
bool find_function(void* library, const char* name, Function& function);

void* find_symbol(void* library, const char* name);

template <typename Function>
bool find_function(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(find_symbol(library, name));
  return function != nullptr;
}

// Formats 13000 as "13.0", as CUDA counts its versions.
std::string cuda_version(int number);

}  // namespace horoplug::cuda
