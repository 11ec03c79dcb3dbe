// Numbers and names, as the page writes them.

const GROUPED = new Intl.NumberFormat("en");
const ONE_PLACE = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const THREE_DIGITS = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const CLOCK = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const COLLATOR = new Intl.Collator("en", { numeric: true });

export const NONE = "–";

export const count = (n) => (n === null ? NONE : GROUPED.format(n));
export const number = (x) => (x === null || x === undefined ? NONE : THREE_DIGITS.format(x));
export const percent = (ratio) => ratio === null ? NONE : `${(ratio * 100).toFixed(ratio > 0 && ratio < 0.9995 ? 1 : 0)} %`;
export const clock = (unixSeconds) => CLOCK.format(unixSeconds * 1000);
export const natural = (a, b) => COLLATOR.compare(a, b);
export const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;

export function duration(s) {
  if (s === null || s === undefined) return NONE;
  if (s < 0.0995) return `${ONE_PLACE.format(s * 1000)} ms`;
  if (s < 0.9995) return `${Math.round(s * 1000)} ms`;
  if (s < 99.95) return `${s.toFixed(s < 9.995 ? 2 : 1)} s`;
  return age(s);
}

/** Whole seconds, minutes, hours. */
export function age(s) {
  const whole = Math.max(0, Math.round(s));
  if (whole < 100) return `${whole} s`;
  if (whole < 6000) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

/** A node's address without what all have. */
export const short = (url) => url.replace(/^http:\/\//, "");

export const words = (name) => String(name).replaceAll("_", " ");

export const mean = (values) => (values.length ? values.reduce((sum, x) => sum + x, 0) / values.length : null);

/** The next larger of 1, 2, 5, 10, 20, ...: a scale that does not flicker with its largest value. */
export function niceCeiling(x) {
  if (!(x > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(x));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= x * (1 - 1e-9));
}
