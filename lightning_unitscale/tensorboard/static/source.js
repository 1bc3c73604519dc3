// Loads the data from TensorBoard's server, or from the page itself in a report.

/** Decodes a frame that `responses.frame` encoded on the server. */
export function parseFrame(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const arrays = {};
  let start = 4 + length;
  for (const { name, shape } of header.arrays) {
    const size = shape.reduce((product, one) => product * one, 1);
    arrays[name] = new Float32Array(buffer, start, size);
    start += 4 * size;
  }
  return { header, arrays };
}

/** A source of answers by route and query; subclasses `read` their bytes. */
class Source {
  runs() {
    return this.json('runs', {});
  }

  async json(route, query) {
    return JSON.parse(new TextDecoder().decode(await this.read(route, query)));
  }

  async frame(route, query) {
    return parseFrame(await this.read(route, query));
  }
}

/** A source that requests the routes of the plugin. */
export class ServerSource extends Source {
  constructor(base) {
    super();
    this.base = base;
    this.isLive = true;
  }

  async read(route, query) {
    const url = new URL(route, this.base);
    url.search = new URLSearchParams(query);
    const response = await fetch(url);
    if (!response.ok) throw new Error(`${response.status}: ${(await response.text()).slice(0, 300)}`);
    return response.arrayBuffer();
  }
}

/** A source that reads the same answers, compressed in base64, from a script element. */
export class EmbeddedSource extends Source {
  constructor(answers) {
    super();
    this.answers = answers;
    this.isLive = false;
  }

  async read(route, query) {
    const answer = this.answers[[route, ...Object.values(query)].join('\n')];
    if (answer === undefined) throw new Error(`${query.tensor ?? route}: not in this report`);
    const bytes = Uint8Array.from(atob(answer), (letter) => letter.charCodeAt(0));
    const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
    return new Response(plain).arrayBuffer();
  }
}
