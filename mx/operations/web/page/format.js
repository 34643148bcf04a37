// Numbers as people read them.

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];

export function bytes(count) {
  let unit = 0;
  while (count >= 999.5 && unit < UNITS.length - 1) {
    count /= 1000;
    unit += 1;
  }
  return `${unit ? count.toPrecision(3) : count} ${UNITS[unit]}`;
}

export function rate(perSecond) {
  return perSecond ? `${bytes(perSecond)}/s` : "";
}

export function seconds(count) {
  if (count < 1) return `${Math.round(count * 1000)} ms`;
  if (count < 60) return `${count.toFixed(count < 10 && count % 1 ? 1 : 0)} s`;
  const whole = Math.round(count);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

export function whole(count) {
  return count.toLocaleString("en");
}

export function many(count, noun) {
  return `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;
}

export function clockTime(date) {
  return date.toLocaleTimeString([], { hour12: false });
}
