// Stores the page's state in the address, so that reloads and links show the same.

const PREFIX = 'scales.';
const BOOLEAN = { true: true, false: false };
/** The fields in an address, and how to parse each; undefined keeps the page's own value. */
const FIELDS = {
  run: (text) => text,
  compared: (text) => text,
  direction: (text) => (['forward', 'backward'].includes(text) ? text : undefined),
  stored: (text) => BOOLEAN[text],
  operandsOnly: (text) => BOOLEAN[text],
  filter: (text) => text,
  limit: (text) => (Number(text) > 0 ? Number(text) : undefined),
  rowMode: (text) => (['fit', 'named'].includes(text) ? text : undefined),
};
const DEFAULTS = { direction: 'forward', stored: true, filter: '', limit: 'auto', rowMode: 'auto' };

/** Reads the parts of the state in the address. */
export function readAddress() {
  const found = new Map(
    parts(page())
      .filter((part) => part.startsWith(PREFIX))
      .map((part) => part.slice(PREFIX.length).split('=').map(decodeURIComponent)),
  );
  const state = {};
  for (const [field, valueOf] of Object.entries(FIELDS)) {
    const value = found.has(field) ? valueOf(found.get(field)) : undefined;
    if (value !== undefined) state[field] = value;
  }
  const step = Number(found.get('step'));
  if (found.has('tensor') && Number.isFinite(step)) state.selected = { name: found.get('tensor'), step };
  return state;
}

/** Writes the state into the address, without a history entry. */
export function writeAddress(state) {
  const host = page();
  const others = parts(host).filter((part) => !part.startsWith(PREFIX));
  // TensorBoard may show another dashboard meanwhile.
  if (host !== window && others[0] !== 'scales') return;
  const fields = Object.keys(FIELDS).map((field) => [field, state[field]]);
  if (state.selected) fields.push(['tensor', state.selected.name], ['step', state.selected.step]);
  const own = fields
    .filter(([field, value]) => value !== null && value !== undefined && value !== DEFAULTS[field])
    .map(([field, value]) => `${PREFIX}${field}=${encodeURIComponent(value)}`);
  // A bare hash would be relative to the base that TensorBoard gives a frame.
  const [address] = host.location.href.split('#');
  const hash = [...others, ...own].join('&');
  if (hash !== parts(host).join('&')) host.history.replaceState(host.history.state, '', `${address}#${hash}`);
}

/** Returns the page with the visible address: TensorBoard's around this frame, or this one. */
function page() {
  try {
    return window.parent.location.hash === undefined ? window : window.parent;
  } catch {
    return window;
  }
}

function parts({ location }) {
  return location.hash.slice(1).split('&').filter(Boolean);
}
