// Finding a shared library at run time, so that nothing is linked.
//
// A process must not have two copies of CUDA's libraries: the one that a framework has already
// loaded comes first, then those at known paths (PyPI's wheels), then what the system has.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace horoplug::cuda {

// Files to try, best first; those that have other names than what is looked for are passed over.
struct LibraryPaths {
  std::vector<std::string> files;
  bool elsewhere = true;  // also what is loaded already, and where the system looks
};

struct Found {
  void* handle = nullptr;  // never closed: these libraries do not survive that
  std::string path;
  std::string problem;  // one line that says why there is none, if there is none
};

// Says what is wrong with a library that could be opened, in one line, or nothing.
using Inspect = std::function<std::string(void* handle)>;

// The first library that can be opened and that `inspect` finds nothing wrong with. `names`: the
// sonames that it can have, best first.
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

// Opens one of these: inspect(handle, library) fills in the table and the rest, and says what is
// wrong.
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

// What is wrong with a file that is to be opened as a library, or an empty string. dlopen checks
// little: it maps a truncated file, and the process dies of it.
std::string check_library_file(const std::string& path);

// Looks one function up.
template <typename Function>
bool find_function(void* library, const char* name, Function& function);

void* find_symbol(void* library, const char* name);

template <typename Function>
bool find_function(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(find_symbol(library, name));
  return function != nullptr;
}

// "13.0" of 13000, as CUDA counts its versions.
std::string cuda_version(int number);

}  // namespace horoplug::cuda
