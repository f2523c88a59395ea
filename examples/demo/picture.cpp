// SPDX-License-Identifier: Apache-2.0
#include "picture.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>

namespace demo {
namespace {

// Pixels.
constexpr double kPanel = 144, kGap = 22, kLeft = 104, kTop = 104, kRowGap = 44, kLegend = 84;
constexpr const char* kInk = "#1f2430";
constexpr const char* kFaint = "#6b7280";
constexpr const char* kDropped = "#e9ecf1";
constexpr const char* kPaper = "#ffffff";

struct Colour {
  double red, green, blue;
};

// From little mass to all of it: light teal over blue to deep violet, monotone in lightness.
constexpr std::array<Colour, 4> kScale{{{158, 216, 206}, {65, 158, 190}, {52, 91, 160}, {45, 24, 84}}};
constexpr double kLeastMass = 1e-3;  // the left end of the scale

std::string colour_of(double mass) {
  const double part = std::clamp(1.0 + std::log10(std::max(mass, kLeastMass)) / -std::log10(kLeastMass), 0.0, 1.0);
  const double at = part * static_cast<double>(kScale.size() - 1);
  const std::size_t low = std::min(static_cast<std::size_t>(at), kScale.size() - 2);
  const double weight = at - static_cast<double>(low);
  const auto mix = [&](double Colour::*channel) {
    return static_cast<int>(std::lround(kScale[low].*channel * (1 - weight) + kScale[low + 1].*channel * weight));
  };
  return fmt::format("#{:02x}{:02x}{:02x}", mix(&Colour::red), mix(&Colour::green), mix(&Colour::blue));
}

std::string text(double x, double y, int size, const char* colour, const char* anchor, const std::string& words,
                 const char* more = "") {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" font-size=\"{}\" fill=\"{}\" text-anchor=\"{}\" {}>{}</text>\n",
                     x, y, size, colour, anchor, more, words);
}

std::string rectangle(double x, double y, double width, double height, const std::string& fill) {
  return fmt::format("<rect x=\"{:.2f}\" y=\"{:.2f}\" width=\"{:.2f}\" height=\"{:.2f}\" fill=\"{}\"/>\n", x, y, width,
                     height, fill);
}

std::string panel(const LayerPicture& layer, std::int64_t head, double x, double y) {
  const TileChoice& choice = layer.choice;
  const double cell = kPanel / static_cast<double>(std::max(choice.key_blocks, choice.query_blocks));
  const double side = std::max(cell * 0.94, cell - 1);  // a hair of paper between the tiles
  std::string svg;
  for (std::int64_t row = 0; row < choice.query_blocks; ++row) {
    for (std::int64_t column = 0; column <= std::min(row, choice.key_blocks - 1); ++column) {
      const auto at = static_cast<std::size_t>((head * choice.query_blocks + row) * choice.key_blocks + column);
      const double left = x + cell * static_cast<double>(column), top = y + cell * static_cast<double>(row);
      svg += rectangle(left, top, side, side, choice.kept(head, row, column) ? colour_of(layer.mass[at]) : kDropped);
    }
  }
  svg += fmt::format(
      "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"none\" stroke=\"#cfd4dc\"/>\n", x - 2,
      y - 2, kPanel + 3, kPanel + 3);
  // In the empty upper half.
  svg += text(x + kPanel - 6, y + 18, 13, kInk, "end", fmt::format("head {}", head), "font-weight=\"600\"");
  svg += text(x + kPanel - 6, y + 35, 12, kFaint, "end", fmt::format("{:.0f} % kept", choice.kept_percent_of(head)));
  return svg;
}

std::string legend(double x, double y) {
  constexpr int kSteps = 60;
  constexpr double kWidth = 240, kHeight = 14;
  std::string svg = text(x, y - 8, 12, kInk, "start", "computed: mean probability mass of the tile");
  for (int step = 0; step < kSteps; ++step) {
    const double mass = std::pow(10.0, std::log10(kLeastMass) * (1 - (step + 0.5) / kSteps));
    svg += rectangle(x + kWidth * step / kSteps, y, kWidth / kSteps + 0.5, kHeight, colour_of(mass));
  }
  svg += text(x, y + 30, 11, kFaint, "start", "0.1 % or less");
  svg += text(x + kWidth, y + 30, 11, kFaint, "end", "100 %");
  svg += rectangle(x + kWidth + 40, y, kHeight, kHeight, kDropped);
  svg += text(x + kWidth + 62, y + 12, 12, kInk, "start", "skipped: its mass was not needed");
  svg += fmt::format(
      "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"{}\" stroke=\"#cfd4dc\"/>\n",
      x + kWidth + 300, y, kHeight, kHeight, kPaper);
  svg += text(x + kWidth + 322, y + 12, 12, kInk, "start", "above the diagonal: hidden by the causal mask");
  return svg;
}

}  // namespace

std::string draw(const std::vector<LayerPicture>& layers, const std::string& title, const std::string& subtitle) {
  std::int64_t heads = 0;
  for (const LayerPicture& layer : layers) heads = std::max(heads, layer.choice.heads);
  const double width = kLeft + static_cast<double>(heads) * (kPanel + kGap) + 10;
  const double rows_end = kTop + static_cast<double>(layers.size()) * (kPanel + kRowGap);
  const double height = rows_end + kLegend;
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0:.0f} {1:.0f}\" width=\"{0:.0f}\" height=\"{1:.0f}\" "
      "font-family=\"Inter, 'Helvetica Neue', Arial, sans-serif\">\n<title>{2}</title>\n",
      width, height, title);
  svg += rectangle(0, 0, width, height, kPaper);
  svg += text(20, 36, 20, kInk, "start", title, "font-weight=\"700\"");
  svg += text(20, 60, 13, kFaint, "start", subtitle);
  for (std::size_t row = 0; row < layers.size(); ++row) {
    const LayerPicture& layer = layers[row];
    const double y = kTop + static_cast<double>(row) * (kPanel + kRowGap);
    svg += text(20, y + kPanel / 2 - 6, 15, kInk, "start", layer.name, "font-weight=\"600\"");
    svg += text(20, y + kPanel / 2 + 13, 12, kFaint, "start", fmt::format("{:.0f} % kept", layer.choice.kept_percent));
    for (std::int64_t head = 0; head < layer.choice.heads; ++head) {
      svg += panel(layer, head, kLeft + static_cast<double>(head) * (kPanel + kGap), y);
    }
  }
  svg += text(kLeft, rows_end - kRowGap + 24, 12, kFaint, "start",
              "key blocks run to the right, query blocks downwards; the first token is at the top left");
  svg += legend(kLeft, rows_end + 20);
  return svg + "</svg>\n";
}

}  // namespace demo
