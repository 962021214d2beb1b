#include "trace/json.h"

#include <cstdint>

namespace horoplug {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD
constexpr std::string_view kEllipsis = "\xE2\x80\xA6";     // U+2026

// Bytes of the UTF-8 character at `at`; 0 if there is no valid one. Overlong forms, surrogates and
// code points beyond U+10FFFF are invalid.
std::size_t character_bytes(std::string_view text, std::size_t at) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[at + i]); };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  std::size_t bytes = 0;
  std::uint32_t code = 0;
  std::uint32_t smallest = 0;
  if ((first & 0xE0) == 0xC0) {
    bytes = 2, code = first & 0x1F, smallest = 0x80;
  } else if ((first & 0xF0) == 0xE0) {
    bytes = 3, code = first & 0x0F, smallest = 0x800;
  } else if ((first & 0xF8) == 0xF0) {
    bytes = 4, code = first & 0x07, smallest = 0x10000;
  } else {
    return 0;
  }
  if (text.size() - at < bytes) return 0;
  for (std::size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
    code = code << 6 | (byte(i) & 0x3F);
  }
  const bool surrogate = code >= 0xD800 && code < 0xE000;
  return code < smallest || code > 0x10FFFF || surrogate ? 0 : bytes;
}

}  // namespace

void append_json_string(std::string& json, std::string_view text, std::size_t limit) {
  constexpr char kHex[] = "0123456789abcdef";
  json += '"';
  const std::size_t begin = json.size();
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t bytes = character_bytes(text, at);
    if (json.size() - begin + (bytes == 0 ? 1 : bytes) > limit) {
      json += kEllipsis;
      break;
    }
    const auto c = static_cast<unsigned char>(text[at]);
    if (bytes == 0) {
      json += kReplacement;
    } else if (c < 0x20) {
      json += "\\u00";
      json += kHex[c >> 4];
      json += kHex[c & 15];
    } else {
      if (c == '"' || c == '\\') json += '\\';
      json += text.substr(at, bytes);
    }
    at += bytes == 0 ? 1 : bytes;
  }
  json += '"';
}

}  // namespace horoplug
