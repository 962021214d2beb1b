// Types of libstdc++, with which TensorFlow's libraries are compiled, as they are in memory.
//
// Horoplug may be compiled with another C++ library: its wheels are, with libc++. TensorFlow's C++
// functions therefore get these types, never horoplug's own std::string, std::string_view or
// std::function.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace horoplug::tensorflow::libstdcxx {

// std::string_view
struct StringView {
  explicit StringView(const char* text) : size(std::string_view(text).size()), data(text) {}

  std::size_t size;
  const char* data;
};

// A std::string that is only read. Its characters belong to another object.
struct String {
  explicit String(const char* text)
      : data(text), size(std::string_view(text).size()), capacity(size) {}

  const char* data;
  std::size_t size;
  std::size_t capacity;
  std::size_t unused = 0;
};

// std::optional<std::string>
struct OptionalString {
  String value;
  bool is_there;
};

// std::function<void()>
struct Function {
  void operator()() const { invoker(this); }

  void* functor[2] = {nullptr, nullptr};  // a small functor, or the address of a large one
  bool (*manager)(void* to, const void* from, int operation) = nullptr;
  void (*invoker)(const void* functor) = nullptr;
};

#if defined(__GLIBCXX__)  // not where horoplug itself uses another library
static_assert(sizeof(StringView) == sizeof(std::string_view));
static_assert(sizeof(String) == sizeof(std::string));
static_assert(sizeof(OptionalString) == sizeof(std::optional<std::string>));
static_assert(sizeof(Function) == sizeof(std::function<void()>));
#endif

}  // namespace horoplug::tensorflow::libstdcxx
