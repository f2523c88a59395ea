// SPDX-License-Identifier: Apache-2.0
#include "options/text_options.h"

#include <charconv>
#include <fstream>
#include <map>
#include <sstream>

#include "tessera/callable.h"
#include "tessera/error.h"

namespace tessera::cli {
namespace {

constexpr const char* kForm = "NAME=FILE[,EXTRA:DTYPE:RANK…], as bias=bias.txt,table:fp32:2";

struct Named {
  std::string name;
  std::string text;
  std::vector<ExtraTensor> extras;
};

ExtraTensor parse_extra(const std::string& word, const char* option) {
  const std::size_t first = word.find(':');
  const std::size_t second = first == std::string::npos ? first : word.find(':', first + 1);
  ExtraTensor extra;
  if (second != std::string::npos) {
    const char* end = word.data() + word.size();
    const auto [rest, error] = std::from_chars(word.data() + second + 1, end, extra.rank);
    extra.name = word.substr(0, first);
    extra.dtype = parse_dtype(word.substr(first + 1, second - first - 1), option);
    if (error == std::errc() && rest == end) return extra;
  }
  throw Error(ErrorCode::parse, option, word, kForm);
}

Named parse(const std::string& value, const char* option) {
  const std::size_t sign = value.find('=');
  if (sign == std::string::npos) throw Error(ErrorCode::parse, option, value, kForm);
  Named named{value.substr(0, sign), "", {}};
  std::istringstream words(value.substr(sign + 1));
  std::string path;
  std::getline(words, path, ',');
  named.text = read_text(path);
  for (std::string word; std::getline(words, word, ',');) named.extras.push_back(parse_extra(word, option));
  return named;
}

}  // namespace

std::string read_text(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw Error(ErrorCode::io, path, "a file that cannot be opened", "a readable file");
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

void TextOptions::register_all() const {
  std::map<std::string, ScoreText> texts;
  for (const std::string& value : scores) {
    const Named named = parse(value, "--score-text");
    if (!texts.try_emplace(named.name, ScoreText{named.text, named.extras}).second) {
      throw Error(ErrorCode::parse, "--score-text", value, "each NAME once");
    }
  }
  for (const std::string& value : derivatives) {
    const Named named = parse(value, "--score-derivative");
    const auto score = texts.find(named.name);
    if (score == texts.end()) {
      throw Error(ErrorCode::parse, "--score-derivative", value, "the NAME of a --score-text");
    }
    if (!named.extras.empty()) {
      throw Error(ErrorCode::parse, "--score-derivative", value, "NAME=FILE: extra tensors are those of the score");
    }
    score->second.derivative_text = named.text;
  }
  for (const auto& [name, text] : texts) register_score(name, text);
  for (const std::string& value : masks) {
    const Named named = parse(value, "--mask-text");
    register_mask(named.name, {named.text, named.extras});
  }
}

void add_text_options(CLI::App& verb, TextOptions& options) {
  verb.add_option("--score-text", options.scores,
                  "For CUDA: what score=NAME is, C++ text from a file, NAME=FILE[,EXTRA:DTYPE:RANK...]; repeatable")
      ->allow_extra_args(false);
  verb.add_option("--score-derivative", options.derivatives,
                  "For a backward: the derivative of the score-text NAME by the score, NAME=FILE; repeatable")
      ->allow_extra_args(false);
  verb.add_option("--mask-text", options.masks, "For CUDA: what mask=NAME is, likewise")->allow_extra_args(false);
}

}  // namespace tessera::cli
