// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/scores/callable_source.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "problem/registered_callables.h"

namespace tessera::cuda {
namespace {

/// Returns the device type of a built-in callable (src/cuda/attention/scores/callables.cuh); nullptr if there is none
/// of that name.
const char* builtin_score_type(std::string_view name) noexcept {
  if (name == "relative") return "RelativeScore";
  if (name == "soft_clip") return "SoftClipScore";
  return nullptr;
}
const char* builtin_mask_type(std::string_view name) noexcept {
  if (name == "document") return "DocumentMask";
  if (name == "checkerboard") return "CheckerboardMask";
  if (name == "prefix") return "PrefixMask";
  return nullptr;
}

bool continues_word(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

/// Returns the end of the comment or quoted text that begins at `at`; `at` itself if none does.
std::size_t skip_unread(std::string_view text, std::size_t at) {
  const auto behind = [&](std::string_view end, std::size_t from) {
    const std::size_t found = text.find(end, from);
    return found == std::string_view::npos ? text.size() : found + end.size();
  };
  if (text.substr(at, 2) == "//") return behind("\n", at);
  if (text.substr(at, 2) == "/*") return behind("*/", at + 2);
  if (text[at] != '\'' && text[at] != '"') return at;
  for (std::size_t i = at + 1; i < text.size(); ++i) {
    if (text[i] == '\\') {
      ++i;
    } else if (text[i] == text[at]) {
      return i + 1;
    }
  }
  return text.size();
}

/// Whether the text has the word, outside comments and quotes.
bool has_word(std::string_view text, std::string_view word) {
  for (std::size_t i = 0; i < text.size();) {
    if (const std::size_t next = skip_unread(text, i); next != i) {
      i = next;
      continue;
    }
    if (!continues_word(text[i])) {
      ++i;
      continue;
    }
    std::size_t end = i;
    while (end < text.size() && continues_word(text[end])) ++end;
    if (text.substr(i, end - i) == word) return true;
    i = end;
  }
  return false;
}

/// Whether a mask's text reads only batch, query and key of `at`, and uses `at` for nothing else. Returns false for a
/// text that could be read in two ways (quotes, continued lines).
bool ignores_head(std::string_view text) {
  if (text.find("head") != std::string_view::npos || text.find_first_of("'\"\\#") != std::string_view::npos)
    return false;
  for (std::size_t i = 0; (i = text.find("at", i)) != std::string_view::npos; i += 2) {
    const bool begins = i == 0 || !continues_word(text[i - 1]);
    const std::string_view behind = text.substr(i + 2);
    if (!begins || (!behind.empty() && continues_word(behind[0]))) continue;
    const auto asks = [&](std::string_view field) {
      return behind.starts_with(field) && (behind.size() == field.size() || !continues_word(behind[field.size()]));
    };
    if (!asks(".batch") && !asks(".query") && !asks(".key")) return false;
  }
  return true;
}

/// Whether the text is a function's body.
bool is_body(std::string_view text) { return has_word(text, "return"); }
bool uses_position(std::string_view text) { return has_word(text, "Position"); }
bool is_linear(std::string_view text) { return has_word(text, "linear_score"); }

/// Whether the text is the number 1, as people and python/tessera/expressions/cuda_text.py write it.
bool is_one(std::string_view text) {
  std::string number;
  for (const char c : text) {
    if (std::string_view(" \t\n();").find(c) == std::string_view::npos) number += c;
  }
  const std::string_view returns = "return";
  if (number.starts_with(returns)) number.erase(0, returns.size());
  constexpr std::array<std::string_view, 6> ones = {"1", "1.0", "1.f", "1.0f", "1.0F", "0x1.0000000000000p+0F"};
  return std::ranges::find(ones, number) != ones.end();
}

/// Returns the declarations through which the text reads its extra tensors; `first`: the index of its first among the
/// problem's.
std::string readers(const std::vector<ExtraTensor>& extras, int first) {
  std::string text;
  for (const ExtraTensor& extra : extras) {
    text += "    [[maybe_unused]] const ExtraTensor<ExtraType::" + std::string(to_string(extra.dtype)) + ", " +
            std::to_string(extra.rank) + "> " + extra.name + "{extras[" + std::to_string(first++) + "]};\n";
  }
  return text;
}

/// Returns a device function around the text. Lines of the text count from 1 in `file`. No #line resets that behind the
/// text: if the compiler misses something there, such as a bracket, the text lacks it.
std::string function(const std::string& head, const std::string& readers, const std::string& text,
                     const std::string& file) {
  const bool body = is_body(text);
  return "  template <class Position>\n  static __device__ __forceinline__ " + head + " {\n" + readers +
         (body ? "" : "    return (\n") + "#line 1 \"" + file + "\"\n" + text + (body ? "\n" : "\n    );\n") + "  }\n";
}

CallableSource builtin(const char* type) { return {type, std::string(" ") + type, "", {}}; }

/// `type`: the struct around `functions`; `files`: the names that #line gives to their texts. A kernel has two versions
/// of each function that uses `Position`, one of them for small positions.
CallableSource written(const std::string& type, const std::string& word, const std::string& functions,
                       bool uses_position, std::vector<std::string> files) {
  const std::string use = std::string("  static constexpr bool uses_position = ") + (uses_position ? "true" : "false");
  return {type, word, "struct " + type + " {\n" + use + ";\n" + functions + "};\n", std::move(files)};
}

CallableSource written_score(const std::string& name, const ScoreText& text, Pass pass) {
  const std::string arguments = "(float score, const ScorePoint& at, const ExtraParams* extras)";
  const std::string reads = readers(text.extras, 0);
  const std::string file = "score " + name;
  std::string functions = function("float value" + arguments, reads, text.text, file);
  std::vector<std::string> files = {file};
  bool position = uses_position(text.text);
  if (pass == Pass::forward && is_linear(text.text)) {
    functions += function("Slope slope(AskedSlope score, const ScorePoint& at, const ExtraParams* extras)", reads,
                          text.text, file);
  }
  if (pass == Pass::backward) {
    const std::string derivative = "derivative of " + file;
    functions += function("float derivative" + arguments, reads, *text.derivative_text, derivative);
    position = position || uses_position(*text.derivative_text);
    files = {derivative, file};  // error messages are searched for the longer name first
  }
  return written("TextScore", " score=" + name, functions, position, files);
}

CallableSource written_mask(const std::string& name, const MaskText& text, int first_extra) {
  const std::string file = "mask " + name;
  return written("TextMask", " mask=" + name,
                 function("bool visible(const ScorePoint& at, const ExtraParams* extras)",
                          readers(text.extras, first_extra), text.text, file),
                 uses_position(text.text), {file});
}

}  // namespace

std::vector<std::string> CallableSources::files() const {
  std::vector<std::string> files;
  for (const CallableSource* source : {&score, &mask}) {
    files.insert(files.end(), source->files.begin(), source->files.end());
  }
  return files;
}

Support has_callables(const Problem& problem) {
  const detail::RegisteredCallables registered(problem);
  const auto missing = [](const char* kind, const std::string& name) {
    return Support::no(std::string("has no ") + kind + " callable " + name +
                       ": it is neither built in nor registered (" + "register_" + kind + " takes C++ text)");
  };
  if (!problem.score.empty() && registered.score == nullptr && builtin_score_type(problem.score) == nullptr) {
    return missing("score", problem.score);
  }
  if (problem.pass == Pass::backward && registered.score != nullptr && !registered.score->derivative_text) {
    return Support::no("has no derivative of score callable " + problem.score +
                       ": register_score takes it as derivative_text, C++ text beside that of the score");
  }
  if (!problem.mask.empty() && registered.mask == nullptr && builtin_mask_type(problem.mask) == nullptr) {
    return missing("mask", problem.mask);
  }
  return Support::yes();
}

bool has_linear_score(const Problem& problem) {
  const detail::RegisteredCallables registered(problem);
  return registered.score != nullptr && is_linear(registered.score->text);
}

bool has_shared_mask(const Problem& problem) {
  if (problem.mask.empty()) return false;
  const detail::RegisteredCallables registered(problem);
  return registered.mask == nullptr || ignores_head(registered.mask->text);  // no built-in mask reads the head
}

bool has_additive_score(const Problem& problem) {
  const detail::RegisteredCallables registered(problem);
  if (registered.score == nullptr) return problem.score == "relative";
  return registered.score->derivative_text && is_one(*registered.score->derivative_text);
}

CallableSources callable_sources(const Problem& problem) {
  const detail::RegisteredCallables registered(problem);
  CallableSources sources;
  if (registered.score != nullptr) {
    sources.score = written_score(problem.score, *registered.score, problem.pass);
  } else if (!problem.score.empty()) {
    sources.score = builtin(builtin_score_type(problem.score));
  }
  if (registered.mask != nullptr) {
    sources.mask = written_mask(problem.mask, *registered.mask, registered.score_extras());
  } else if (!problem.mask.empty()) {
    sources.mask = builtin(builtin_mask_type(problem.mask));
  }
  return sources;
}

}  // namespace tessera::cuda
